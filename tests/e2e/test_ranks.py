"""Two ranks on this machine: the real trainer under `accelerate launch`, an engine on each rank.

What the ranks do is in rank_stories.py; here is what they must have left. Two launches serve all.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from paths import PYTHONPATH, TESTS

from agent_vllm.record import read_rollouts

GAP = 5e-5
pytestmark = [pytest.mark.vllm, pytest.mark.e2e]


def launch(folder, *stories):
    """Run stories on two ranks; returns the exit code and what they printed."""
    command = [
        Path(sys.executable).with_name("accelerate"), "launch", "--multi_gpu", "--num_processes=2",
        "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0",
        TESTS / "rank_stories.py", folder, *stories,
    ]  # fmt: skip
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    try:
        output, _ = run.communicate(timeout=400)
    finally:
        if run.poll() is None:  # a rank hangs
            os.killpg(run.pid, signal.SIGKILL)
    return run.returncode, output


@pytest.fixture(scope="module")
def first(agent_path, tmp_path_factory):
    """The folder of the stories, and what was printed until the last one ended the launch."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, *launch(
        folder, "scripted", "torch_engine", "vllm_engine", "alone", "lost_engine"
    )


@pytest.fixture(scope="module")
def second(first, tmp_path_factory):
    """The vLLM story again from its checkpoint in the middle by new processes, and FSDP2."""
    folder = tmp_path_factory.mktemp("again")
    checkpoint = Path("vllm_engine", "checkpoint-2")
    shutil.copytree(first[0] / checkpoint, folder / "resumed" / checkpoint.name)
    code, output = launch(folder, "resumed", "sharded")
    assert code == 0, output[-3000:]
    return folder


@pytest.fixture(params=["scripted", "torch_engine", "vllm_engine"])
def story(first, request):
    folder, _, output = first
    assert (folder / request.param / "facts-1.json").exists(), output[-3000:]
    return folder / request.param


def facts(folder):
    return [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in range(2)]


def records(folder):
    names = ("rollouts.jsonl", "rollouts-1.jsonl")
    return [list(read_rollouts(folder / name)) for name in names]


def batches(folder):
    """The records of both ranks by mode, step and rollout, in the order of the groups."""
    found = defaultdict(list)
    for rank in records(folder):
        for record in rank:
            found[record["mode"], record["step"], record["rollout"]].append(record)
    return found


def logged(folder, step, name, prefix=""):
    """Return what both ranks logged after a step: the same."""
    first, second = (
        next(log[name] for log in rank["log"] if log["step"] == step and name in log)
        for rank in facts(folder)
    )
    assert first == second
    return first


# ---- rows ----


def test_every_row_has_the_completion_of_its_own_prompt(story):
    for batch in batches(story).values():
        for record in batch:
            question = record["messages"][0]["content"]
            row = record["row"]
            if "marker" not in row:
                continue
            assert question == f"marker {row['marker']}."
            answer = record["messages"][-1]["content"]
            assert record["stop_reason"] == "engine_error" or answer.startswith(question)
            assert all(r.content == f"seen {row['marker']}" for r in record["tool_results"])


def test_the_learner_agrees_with_each_rows_logprobs(first):
    """Another prompt's completion would be far off."""
    for name in ("torch_engine", "vllm_engine"):
        for batch in batches(first[0] / name).values():
            for r in batch:
                pairs = zip(r["learner_logprobs"], r["logprobs"], strict=True)
                assert max(abs(learner - engine) for learner, engine in pairs) <= GAP


def test_ranks_differ_in_turns_and_meet_nobody_in_a_rollout(first):
    """Rank 0's first tool call waits until rank 1 has ended its rollout without any call."""
    folder = first[0] / "scripted"
    slow, fast = records(folder)
    assert {len(r["turn_outputs"]) for r in slow} == {2, 3, 4}
    assert {len(r["turn_outputs"]) for r in fast if r["stop_reason"] == "answered"} == {1}
    assert {f["guard"] for f in facts(folder)} == {"a collective inside a rollout"}  # awake


def test_groups_that_lie_on_both_ranks_have_their_own_advantages(story):
    for (mode, _, _), batch in batches(story).items():
        groups = defaultdict(list)
        for record in batch:
            groups[record["group"]].append(record)
        size = 4 if mode == "train" else 2
        assert {len(group) for group in groups.values()} == {size}
        assert mode == "eval" or len({r["rank"] for r in groups[sorted(groups)[1]]}) == 2
        for group in groups.values():
            assert len({json.dumps(r["messages"][0]) for r in group}) == 1
            assert [r["generation"] for r in group] == list(range(size))
            assert [r["advantage"] for r in group] == pytest.approx(advantages(group), abs=1e-5)


def advantages(group):
    rewards = [sum(r["rewards"].values()) for r in group if None not in r["rewards"].values()]
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [
        0.0 if None in r["rewards"].values() else (sum(r["rewards"].values()) - mean) / (std + 1e-4)
        for r in group
    ]


def test_ranks_compute_what_their_rows_share_once(story):
    assert logged(story, 1, "shared_prefix/ratio") > 1


def test_rows_that_fail_on_one_rank_are_left_out_there_alone(first):
    slow, fast = records(first[0] / "scripted")
    failed = [r for r in fast if r["stop_reason"] == "engine_error"]
    assert [(r["row"]["marker"], r["trained"], r["advantage"]) for r in failed] == [
        ("5", False, 0.0)
    ] * 2
    partners = [r for r in slow if r["row"]["marker"] == "5"]
    assert [r["trained"] for r in partners] == [True, True]
    assert sum(r["advantage"] for r in partners) == pytest.approx(0.0)


# ---- figures ----


def test_metrics_weigh_tokens_not_ranks(story):
    trained = [(step, b) for (mode, step, _), b in batches(story).items() if mode == "train"]
    assert trained
    for step, batch in trained:
        lengths = [sum(r["completion_mask"]) for r in batch]
        gaps = [
            abs(learner - engine)
            for r in batch
            if r["trained"]
            for learner, engine, bit in zip(
                r["learner_logprobs"], r["logprobs"], r["completion_mask"], strict=True
            )
            if bit
        ]
        figures = {
            "completions/mean_length": sum(lengths) / len(batch),
            "rollout/sampled_tokens": sum(lengths),
            "rollout/trained_tokens": len(gaps),
            "rollout/turns": sum(len(r["turn_outputs"]) for r in batch) / len(batch),
            "tools/call_frequency": sum(len(r["tool_results"]) for r in batch) / len(batch),
            "sampling/logprob_gap/mean": sum(gaps) / len(gaps),
            "sampling/logprob_gap/max": max(gaps),
        }
        if story.name == "scripted":  # TRL's own, with `old_logprobs="recomputed"`
            figures["sampling/sampling_logp_difference/mean"] = sum(gaps) / len(gaps)
        for name, value in figures.items():
            assert logged(story, step + 1, name) == pytest.approx(value, rel=2e-3), name


def test_ranks_sample_with_seeds_of_their_own_and_hold_the_same_weights(story):
    seeds = [
        [(r["mode"], r["step"], r["rollout"], r["seed"]) for r in rank] for rank in records(story)
    ]
    assert not set(seeds[0]) & set(seeds[1])
    one, other = facts(story)
    assert (one["weights"], one["versions"]) == (other["weights"], other["versions"])
    assert one["world_size"] == 2


def test_evaluation_fills_up_uneven_rows_and_keeps_groups(first):
    """Five rows of two generations on two ranks of four: sixteen places."""
    folder = first[0] / "torch_engine"
    evaluations = [(step, b) for (mode, step, _), b in batches(folder).items() if mode == "eval"]
    assert [(step, len(batch)) for step, batch in evaluations] == [(0, 8), (0, 8), (2, 8), (2, 8)]
    questions = [r["messages"][0]["content"] for _, batch in evaluations[:2] for r in batch]
    assert len(set(questions)) == 5


# ---- engines and runs ----


def test_each_rank_opens_and_closes_its_own_engines(first):
    """One rank alone opens two at once, closes them and opens another; the other needn't wait."""
    for rank in facts(first[0] / "alone"):
        assert rank == {"num_rows": [[], [2, 2, 2]], "is_default_kept": True}


def test_an_engine_that_dies_on_one_rank_ends_the_run_on_both(first):
    folder, code, output = first
    assert code != 0
    assert not list((folder / "lost_engine").glob("facts-*"))
    assert re.search(r"EngineDeadError: .*it failed all 6 trajectories.*lost", output)
    assert re.search(r"EngineDeadError: .*it lives, but not those of all other", output)


def test_two_ranks_resume_in_new_processes_token_by_token(first, second):
    resumed = second / "resumed"
    whole = [[r for r in rank if r["step"] >= 2] for rank in records(first[0] / "vllm_engine")]
    again = records(resumed)
    for name in (
        "step", "row", "seed", "prompt_ids", "completion_ids", "rewards", "policy_versions",
    ):  # fmt: skip
        assert [[r[name] for r in rank] for rank in again] == [
            [r[name] for r in rank] for rank in whole
        ], name
    for step in (3, 4):  # on the resumed weights, not the base model's
        assert logged(resumed, step, "sampling/logprob_gap/max") <= GAP
        for name in ("loss", "entropy", "num_tokens", "reward"):
            expected = logged(first[0] / "vllm_engine", step, name)
            assert logged(resumed, step, name) == pytest.approx(expected, abs=1e-4), name


def test_fsdp2_ranks_train_and_their_engines_follow(second):
    for rank in facts(second / "sharded"):
        assert rank["num_shards"] > 20 and rank["share"] == pytest.approx(0.5, abs=0.01)
        assert rank["versions"] == 1 + 2
    for step in (1, 2):
        assert logged(second / "sharded", step, "sampling/logprob_gap/max") <= 1e-5
        assert logged(second / "sharded", step, "shared_prefix/ratio") > 1
