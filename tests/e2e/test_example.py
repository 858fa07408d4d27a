"""The example as a user runs it: a process of its own, its files, Ctrl-C in the middle."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paths import EXAMPLES
from transformers import AutoModelForCausalLM

from agent_vllm.record import read_rollouts

SCRIPT = EXAMPLES / "train_tool_agent.py"
pytestmark = pytest.mark.e2e


def command(agent_path, output_dir, **options):
    settings = {
        "model": agent_path,
        "output_dir": output_dir,
        "max_steps": 2,
        "num_eval_tasks": 8,
        "per_device_train_batch_size": 16,
        "save_steps": 1,
        **options,
    }
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return [sys.executable, str(SCRIPT), *arguments]


@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_run_leaves_its_summary_rollouts_plot_and_checkpoint(agent_path, tmp_path, engine):
    run = subprocess.run(
        command(agent_path, tmp_path, engine=engine), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "8 held-out tasks" in run.stdout and "train rollout at step 1" in run.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["engine"] == engine
    assert (summary["data"], summary["steps"], len(summary["reward_curve"])) == ("tiny", 2, 2)
    for when in ("before", "after"):
        assert {"success", "well_formed", "mean_turns", "num_tasks"} <= summary[when].keys()
    assert summary["seconds"].keys() == {"set_up", "rollout", "learn", "sync"}
    assert summary["peak_rss_mb"] < 6000
    assert len(list(read_rollouts(tmp_path / "rollouts.jsonl"))) == 2 * 16
    for name in ("reward", "stop_reasons", "gap", "gantt"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    AutoModelForCausalLM.from_pretrained(tmp_path / "final")


def test_the_control_shuffles_the_advantages(agent_path, tmp_path):
    arguments = command(agent_path, tmp_path, engine="torch", control="shuffled-advantages")
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads((tmp_path / "summary.json").read_text())["control"] == "shuffled-advantages"
    assert "after control" in run.stdout


def descendants(pid):
    listing = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True)
    parents = {int(a): int(b) for a, b in map(str.split, listing.stdout.splitlines())}
    found, front = set(), {pid}
    while front:
        front = {child for child, parent in parents.items() if parent in front} - found
        found |= front
    return found


@pytest.mark.vllm
def test_ctrl_c_ends_the_run_with_everything_whole(agent_path, tmp_path):
    arguments = command(agent_path, tmp_path, engine="vllm", max_steps=500)
    run = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for line in run.stderr:
            if "train rollout at step 2" in line:
                break
        children = descendants(run.pid)
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=30)
    finally:
        run.kill()
    assert run.returncode == 1, output
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    checkpoints = [name for name in os.listdir(tmp_path) if name.startswith("checkpoint-")]
    assert checkpoints
    for name in checkpoints:
        AutoModelForCausalLM.from_pretrained(tmp_path / name)
    assert len(list(read_rollouts(tmp_path / "rollouts.jsonl"))) >= 2 * 16  # whole lines


def test_bad_arguments_are_refused_by_name(tmp_path):
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--engine=sglang"], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "--engine" in run.stderr and "sglang" in run.stderr
