"""The checks for a GPU, as far as a CPU can run them."""

import json
import os
import subprocess
import sys

import pytest
from paths import ROOT

pytestmark = pytest.mark.e2e


def lines_of(*arguments):
    """Run the command; return its exit status and its lines by the name of their check."""
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    return process.returncode, {line["check"]: line for line in lines}


def test_a_check_follows_a_learner_in_bfloat16_on_a_cpu(agent_path):
    status, lines = lines_of("--cpu", "--only", "bf16")
    assert status == 0, lines
    gaps = lines["bf16"]["facts"]["gaps"]
    assert len(gaps) == 4 and 1e-4 < max(gap["mean"] for gap in gaps) < 0.1


def test_a_check_that_fails_is_reported_and_the_next_one_runs():
    """Sleep needs a GPU."""
    status, lines = lines_of("--cpu", "--only", "sleep", "--only", "environment")
    assert status == 1
    assert "sleep mode is not supported" in lines["sleep"]["error"]
    assert lines["environment"]["ok"] and lines["environment"]["facts"]["device"] == "cpu"
