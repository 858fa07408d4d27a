"""`make stops`: Ctrl-C and SIGTERM at random moments of a real training run, by a seed.

    PYTHONPATH=tests:examples python -m stress.stops --num-moments 20

Imports everything once, then forks a run of `examples/train_tool_agent.py` (the tiny agent, vLLM)
for each moment. A run must end in time, without a traceback, leaving no process and only whole
lines and checkpoints; a further run must go on from the last checkpoint.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import importlib
import json
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from random import Random

import train_tool_agent
from tiny_agent import tiny_agent_path
from transformers.trainer_utils import get_last_checkpoint

LATEST_S = 8.0  # after its start, or after its first rollout
IMPORTED_LATE = (  # by vLLM while it starts: imports come before the moments
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
)


def start(folder: Path, **options: object) -> int:
    """A run in a child of its own session; returns its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
        log = os.open(folder.with_suffix(".log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        settings = {
            "model": tiny_agent_path("small"),
            "output_dir": folder,
            "max_steps": 500,
            "num_eval_tasks": 8,
            "per_device_train_batch_size": 16,
            "save_steps": 1,
            "disable_tqdm": True,
            **options,
        }
        sys.argv = ["run", *(f"--{k.replace('_', '-')}={v}" for k, v in settings.items())]
        train_tool_agent.main()
        status = 0
    except SystemExit as error:
        print(error.code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(child: int, seconds: float) -> int | None:
    """Its exit status; None if it did not end in time, and was killed."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def left_in_session(session: int) -> list[str]:
    """Processes of a run that outlived it."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


def problems(folder: Path, status: int | None, child: int) -> list[str]:
    """Return what a stopped run left that is not as it should be."""
    found = []
    log = folder.with_suffix(".log").read_text(errors="replace")
    if status != 1:
        found.append(f"exit status {status}: {log[-3000:]}")
    if "Traceback" in log:
        found.append("a traceback: " + log[log.index("Traceback") :][:1500])
    if log.count("Stopped.") != 1:
        found.append("no word of having stopped")
    if left := left_in_session(child):
        found.append(f"processes left: {left}")
    record = folder / "rollouts.jsonl"
    for line in record.read_bytes().splitlines(keepends=True) if record.exists() else []:
        json.loads(line)
        if not line.endswith(b"\n"):
            found.append("the record's last line was cut")
    return found


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Say when a run is stopped, and how."""

    in_training: bool  # else while it starts
    after_s: float
    number: signal.Signals

    @classmethod
    def drawn(cls, choice: Random) -> "Moment":
        return cls(
            in_training=choice.random() < 0.7,
            after_s=choice.uniform(0.2, LATEST_S),
            number=choice.choice([signal.SIGINT, signal.SIGTERM]),
        )

    def wait(self, folder: Path) -> None:
        record = folder / "rollouts.jsonl"
        give_up = time.monotonic() + 300
        while self.in_training and time.monotonic() < give_up:
            if record.exists() and record.stat().st_size:
                break
            time.sleep(0.02)
        time.sleep(self.after_s)

    def __str__(self) -> str:
        when = "training" if self.in_training else "starting"
        return f"{self.number.name} {self.after_s:3.1f} s into {when}"


def stop_once(folder: Path, moment: Moment, patience_s: float) -> tuple[str, list[str]]:
    """Starts, stops and resumes a run; what there was to see, and what is wrong."""
    child = start(folder)
    moment.wait(folder)
    os.kill(child, moment.number)
    sent = time.monotonic()
    status = wait(child, patience_s)
    took_s = time.monotonic() - sent
    found = problems(folder, status, child)
    last = get_last_checkpoint(folder) if folder.exists() else None
    seen = f"{moment}, ended in {took_s:4.1f} s"
    if last is None:
        return f"{seen}, before the first checkpoint", found
    step = int(last.rsplit("-", 1)[1])
    resumed = start(folder, resume_from_checkpoint=last, max_steps=step + 1)
    if wait(resumed, 300) != 0 or not (folder / f"checkpoint-{step + 1}").exists():
        log = folder.with_suffix(".log").read_text(errors="replace")
        found.append(f"could not be resumed at step {step}: {log[-1500:]}")
    return f"{seen}, resumed at step {step}", found


def stop_at_random(num_moments: int, seed: int = 0, patience_s: float = 10.0) -> int:
    """Return how many of the moments were bad; prints each."""
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    choice, num_bad = Random(seed), 0
    for index in range(num_moments):
        with tempfile.TemporaryDirectory(prefix="stops-") as folder:
            seen, found = stop_once(Path(folder) / "run", Moment.drawn(choice), patience_s)
        print(f"{index + 1:2}: {seen}", flush=True)
        for problem in found:
            print(f"    FAILED: {problem}", flush=True)
        num_bad += bool(found)
    return num_bad


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stress.stops", description=__doc__)
    parser.add_argument("--num-moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience-s", type=float, default=10.0, help="more on a busy machine")
    arguments = parser.parse_args()
    num_bad = stop_at_random(arguments.num_moments, arguments.seed, arguments.patience_s)
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
