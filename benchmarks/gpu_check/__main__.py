"""Run all checks, each in a process with its own time limit; print one line of JSON per check.

python -m benchmarks.gpu_check --only bf16 --only sleep
python -m benchmarks.gpu_check --cpu     # what a CPU can show

No network is used. Exit status 1 if a check fails.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))  # the models

import torch

from benchmarks.gpu_check.checks import CHECKS
from benchmarks.runner import ENVIRONMENT


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(CHECKS), metavar="NAME")
    parser.add_argument("--cpu", action="store_true", help="run what a CPU can show, on the CPU")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # one, in this process
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.cpu else "cuda")
    if arguments.inside:
        (name,) = arguments.only
        arguments.inside.write_text(json.dumps(CHECKS[name].run(device)))
        return 0
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU was found. Use --cpu to run what a CPU can show.")
    names = arguments.only or [
        n for n, check in CHECKS.items() if check.on_cpu or not arguments.cpu
    ]
    results = []
    for name in names:
        results.append(run_apart(name, arguments.cpu))
        print(json.dumps(results[-1]), flush=True)
    return 0 if all(result["ok"] for result in results) else 1


def run_apart(name: str, on_cpu: bool) -> dict[str, Any]:
    """Run one check in a process group of its own, which ends with its time limit."""
    start_s, limit_s = time.perf_counter(), CHECKS[name].limit_s
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "facts.json"
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--only", name]
        process = subprocess.Popen(
            [*command, "--inside", str(output), *["--cpu"] * on_cpu],
            cwd=ROOT, env={**ENVIRONMENT, "HF_HUB_OFFLINE": "1"}, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            _, said = process.communicate(timeout=limit_s)
            outcome = {"error": said[-1500:]}
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # servers and training runs too
            process.communicate()
            outcome = {"error": f"took longer than {limit_s} s"}
        is_ok = process.returncode == 0
        if is_ok:
            outcome = {"facts": json.loads(output.read_text())}
    seconds = round(time.perf_counter() - start_s, 1)
    return {"check": name, "ok": is_ok, "seconds": seconds, **outcome}


if __name__ == "__main__":
    sys.exit(main())
