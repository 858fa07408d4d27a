"""The example as a user runs it: one round of rejection sampling, in a process of its own."""

import subprocess
import sys

import pytest
from datasets import load_dataset
from paths import EXAMPLES

pytestmark = pytest.mark.e2e


def test_a_round_keeps_what_was_right_and_reports_the_gain(tmp_path):
    options = ["--engine", "torch", "--num_tasks", "16", "--output_dir", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "rejection_sampling.py"), *options],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    num_kept = len(load_dataset("parquet", data_files=str(tmp_path / "sft.parquet"))["train"])
    assert 0 < num_kept < 16 * 8
    assert f"{num_kept} of 128 trajectories are fine-tuned on" in run.stdout
    assert "success on 200 held-out tasks: 0." in run.stdout
