"""FSDP2 learners on two gloo ranks, for real on a CPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from paths import PYTHONPATH, TESTS

TOLERANCE = 1e-5
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what each of two processes found, by engine and learner."""
    directory = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    script = str(TESTS / "sharded_learner.py")
    engines = "torch vllm" if importlib.util.find_spec("vllm") else "torch"
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(directory), engines],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=400)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(o[-3000:] for o in outputs)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("trained", ["whole", "lora"])
@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_engines_follow_a_sharded_learner(found, engine, trained, capsys):
    ranks = [rank[f"{engine} {trained}"] for rank in found]
    for rank in ranks:
        assert rank["same_names"]
        assert rank["num_gathered_for_shapes"] == 0
        assert max(rank["gaps"]) <= TOLERANCE, ranks
        assert rank["largest_difference"] <= 1e-6
        if trained == "whole":  # a merged layer is whole beside its adapter
            assert rank["peak_bytes"] <= rank["largest_bytes"]
    assert ranks[0]["stale"] > 100 * TOLERANCE
    assert len(ranks[0]["stops_early"]) == 3
    with capsys.disabled():
        worst = max(max(rank["gaps"]) for rank in ranks)
        peak = ranks[0]["peak_bytes"] / ranks[0]["largest_bytes"]
        print(
            f"\n  FSDP2, two ranks, {engine}, {trained}: max |engine - learner| = {worst:.2e}, "
            f"peak above the shards {peak:.2f} x the largest tensor"
        )
