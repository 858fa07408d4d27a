"""Check a training run's record and log: fields, logprobs of shuffled rows, metric names."""

import dataclasses
import math
import re

import hostile_objects
import pytest
import torch
from fakes import observed, sampled, trajectory
from paths import DOCS
from trainers import GAP, REWARDS, TOOLS, config, fresh, rows
from transformers import AutoTokenizer

from agent_vllm.engines.base import EngineStats
from agent_vllm.record import read_batches, read_rollouts, redact_secrets
from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.types import Span, StopReason, ToolResult
from trl_integration import AgentGRPOTrainer
from trl_integration.metrics import rollout_metrics
from trl_integration.recording import RecordedRollout, TrainingRecord


def train(agent_path, folder, trainer_options=None, engine="torch", **changes):
    model, tokenizer = fresh(agent_path)
    args = config(folder, max_turns=4, record_rollouts=True, **changes)
    trainer = AgentGRPOTrainer(
        model, REWARDS, args, rows(8), rows(2), tokenizer, tools=TOOLS, rollout_engine=engine,
        **(trainer_options or {}),
    )  # fmt: skip
    trainer.train()
    trainer.close()
    return trainer


def distance(record):
    """Of the learner's logprobs from the engine's, at most."""
    pairs = zip(record["learner_logprobs"], record["logprobs"], strict=True)
    return max(abs(learner - engine) for learner, engine in pairs)


def test_the_learners_logprobs_find_their_rows_through_shuffle_and_split(agent_path, tmp_path):
    train(
        agent_path, tmp_path, max_steps=2, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1, eval_on_start=True,
        per_device_eval_batch_size=8,
    )  # fmt: skip
    records = list(read_rollouts(tmp_path / "rollouts.jsonl"))
    assert [(r["mode"], r["step"]) for r in records[::8]] == [
        ("eval", 0), ("train", 0), ("eval", 1), ("train", 1), ("eval", 2),
    ]  # fmt: skip
    assert max(map(distance, records)) <= GAP
    mixed = {"logprobs": records[8]["logprobs"], "learner_logprobs": records[9].learner_logprobs}
    length = min(map(len, mixed.values()))
    cut = {name: values[:length] for name, values in mixed.items()}
    assert distance(cut) > GAP  # another row's would be seen


def test_rows_seen_only_after_the_learner_moved_on_stay_unmeasured(agent_path, tmp_path):
    train(
        agent_path, tmp_path, max_steps=3, per_device_train_batch_size=4, steps_per_generation=2,
        eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8,
    )  # fmt: skip
    batches = list(read_batches(tmp_path / "rollouts.jsonl"))
    known = {
        (batch[0]["mode"], batch[0]["step"]): [r["learner_logprobs"] is not None for r in batch]
        for batch in batches
    }
    assert sum(known["train", 0]) == 4  # the second half came after the first step's sync
    assert sum(known["eval", 1]) == 8
    measured = [r for batch in batches for r in batch if r["learner_logprobs"] is not None]
    assert max(map(distance, measured)) <= GAP


def test_the_record_says_what_the_trainer_knows(agent_path, tmp_path):
    def script(_):
        is_cut = len(engine.requests) % 2
        return engine.encode_turn("It is hard to say. " * 9 if is_cut else "Yes.")

    engine = ScriptedRolloutEngine(AutoTokenizer.from_pretrained(agent_path), script)
    trainer = train(
        agent_path, tmp_path, engine=engine, max_steps=1, mask_truncated_completions=True,
        max_new_tokens=24, temperature=0.9, max_logprob_gap=math.inf,
    )  # fmt: skip
    records = list(read_rollouts(tmp_path / "rollouts.jsonl"))
    assert [r["id"] for r in records] == [f"train-0-0-{row}" for row in range(8)]
    assert [(r["group"], r["generation"]) for r in records] == [
        (group, generation) for group in range(2) for generation in range(4)
    ]
    for record, t in zip(records, trainer.trajectories, strict=True):
        assert record["completion_ids"] == t.completion_ids
        assert record["trained"] == (not t.stop_reason.is_truncated)
        assert record["row"].keys() == rows().features.keys() - {"prompt"}
        assert record["tools"] == ["calculator", "get_weather", "get_price"]
        assert (record["temperature"], record["rollout"]) == (0.9, 0)
        assert record["max_model_len"] == trainer.rollout_engine.max_model_len
        assert record["rewards"].keys() == {"correct_reward", "format_reward"}
        assert record["started"] <= record["time"]
    assert {r["trained"] for r in records} == {True, False}
    assert len({r["seed"] for r in records}) == 1


def test_redacted_text_reaches_no_file(agent_path, tmp_path):
    options = {"redact_rollouts": redact_secrets("calculator")}
    train(agent_path, tmp_path, options, max_steps=1)
    records = list(read_rollouts(tmp_path / "rollouts.jsonl"))
    assert "calculator" not in (tmp_path / "rollouts.jsonl").read_text()
    assert all(-1 in r["prompt_ids"] and r["learner_logprobs"] is not None for r in records)


def rollout(num_rows, rank, **changes):
    fields = {
        "trajectories": [trajectory([1], sampled(2), observed(3)) for _ in range(num_rows)],
        "rows": [{}] * num_rows, "tools": [[]] * num_rows, "rewards": [{}] * num_rows,
        "advantages": [0.0] * num_rows, "trained": [True] * num_rows, "mode": "train", "step": 0,
        "rank": rank, "num_generations": 4, "num_processes": 2, "seed": 0, "started": 0.0,
        "temperature": 1.0, "max_model_len": 8,
    }  # fmt: skip
    return RecordedRollout(**{**fields, **changes})


def test_a_group_that_ranks_share_has_one_number(tmp_path, tokenizer):
    for rank in range(2):
        record = TrainingRecord(tmp_path, rank, tokenizer, None)
        for _ in range(2):  # two rollouts in one step
            record.write(rollout(6, rank))
        record.close()
    first, second = (
        [(r["rollout"], r["group"], r["generation"]) for r in read_rollouts(tmp_path / name)]
        for name in ("rollouts.jsonl", "rollouts-1.jsonl")
    )
    assert first[:6] == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 1, 0), (0, 1, 1)]
    assert second[:6] == [(0, 1, 2), (0, 1, 3), (0, 2, 0), (0, 2, 1), (0, 2, 2), (0, 2, 3)]
    assert first[6:] == [(1, 3 + group, generation) for _, group, generation in first[:6]]
    assert second[6:] == [(1, 3 + group, generation) for _, group, generation in second[:6]]


def test_a_rows_logprobs_are_amended_once(tmp_path, tokenizer):
    record = TrainingRecord(tmp_path, 0, tokenizer, None)
    numbers = record.write(rollout(2, 0))
    record.amend("train", numbers.flip(0), torch.tensor([[-2.0, -9.0], [-1.0, -9.0]]))
    record.amend("train", numbers, torch.zeros(2, 2))
    record.close()
    known = [r["learner_logprobs"] for r in read_rollouts(tmp_path / "rollouts.jsonl")]
    assert known == [[-1.0, 0.0], [-2.0, 0.0]]


@pytest.mark.parametrize("name", ["refuses __str__", "no class", "a list of itself", "hostile key"])
def test_a_row_that_can_not_be_written_is_left_out_alone(tmp_path, tokenizer, name):
    record = TrainingRecord(tmp_path, 0, tokenizer, None)
    record.write(rollout(2, 0, rows=[{"value": hostile_objects.VALUES[name]()}, {"value": 1}]))
    record.close()
    assert [r.row for r in read_rollouts(tmp_path)] == [{"value": 1}]
    assert record.num_failed == 1


def test_a_record_that_can_not_be_written_is_counted_and_reported(tmp_path, tokenizer, caplog):
    def redact(line):
        if line["row"]["number"] < 2:
            raise KeyError(line["row"]["number"])
        return line

    endless = []
    endless.append(endless)
    rows = [{"number": 0}, {"number": 1}, {"number": 2}, {"number": 3, "more": endless}]
    record = TrainingRecord(tmp_path, 0, tokenizer, redact)
    numbers = record.write(rollout(4, 0, rows=rows))
    record.amend("train", numbers, torch.full((4, 2), -1.0))
    record.close()
    assert [r.row for r in read_rollouts(tmp_path)] == [{"number": 2}]
    assert record.num_failed == 3
    said = [entry.getMessage() for entry in caplog.records]
    assert said[0] == "A rollout is not in the record: KeyError(0)"
    assert said[-1].endswith("rollouts.jsonl: 3 lines could not be written.")
    assert len(said) == 3  # each kind of failure once, and the number


# ---- metrics ----


def call(tool, seconds, status="ok"):
    return (
        Span(kind="tool", name=tool, start_s=1.0, end_s=1.0 + seconds),
        ToolResult(name=tool, content="", status=status),
    )


def with_calls(*calls, stop_reason=StopReason.ANSWERED, model_s=2.0):
    spans = [Span(kind="model", name="turn 0", start_s=0.0, end_s=model_s)]
    return trajectory(
        [1, 1], sampled(2, 3, 4), stop_reason=stop_reason, turn_outputs=["a"],
        spans=spans + [span for span, _ in calls], tool_results=[result for _, result in calls],
    )  # fmt: skip


STATS = EngineStats(num_prompt_tokens=8, num_cached_tokens=6, num_steps=4, num_waiting=10)


def test_the_figures_of_a_rollout():
    metrics, num_tokens = rollout_metrics(
        [
            with_calls(*(call("add", seconds / 10) for seconds in range(1, 21))),
            with_calls(call("add", 3.0, "failed"), call("made up", 0.0, "invalid"), model_s=1.0),
            with_calls(stop_reason=StopReason.TURN_LENGTH),
            with_calls(stop_reason=StopReason.ENGINE_ERROR),
        ],
        seconds=8.0, stats=STATS,
    )  # fmt: skip
    assert num_tokens == 4 * (2 + 3)
    expected = {
        "completions/clipped_ratio": 0.5,
        "rollout/turns": 1.0,
        "rollout/seconds": 8.0,
        "rollout/overlap": 1.0 / 8.0,  # tools run from 1 to 4 s, the model until 2 s
        "rollout/tool_seconds": (2.0 + 3.0) / 4,
        "rollout/model_seconds": 7.0 / 4,
        "rollout/tokens_per_second": 1.5,
        "rollout/stop_reason/answered": 0.5,
        "rollout/stop_reason/turn_length": 0.25,
        "tools/call_frequency": 22 / 4,
        "tools/failure_frequency": 2 / 22,
        "tools/invalid_frequency": 1 / 22,
        "tools/add/call_frequency": 21 / 4,
        "tools/add/failure_frequency": 1 / 21,
        "tools/add/seconds_p50": 1.1,
        "tools/add/seconds_p95": 2.0,
        "engine/prefix_cache_hit_rate": 0.75,
        "engine/queue_depth": 2.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert not any("made up" in name for name in metrics)


def test_a_tool_named_user_and_the_simulated_user_are_told_apart():
    called = with_calls(call("user", 3.0))
    span = Span(kind="user", name="user", start_s=4.0, end_s=9.0)
    turn = dataclasses.replace(called.turns[0], user_span=span)
    metrics, _ = rollout_metrics([dataclasses.replace(called, turns=[turn])], seconds=10.0)
    assert metrics["tools/user/seconds_p50"] == pytest.approx(3.0)
    assert metrics["tools/user/seconds_p95"] == pytest.approx(3.0)
    assert (metrics["rollout/tool_seconds"], metrics["rollout/user_seconds"]) == (3.0, 5.0)


def test_a_user_before_a_call_of_a_tool_named_user():
    """Spans matched by name gave the tool the first span of that name."""
    first = trajectory(
        [1], sampled(2),
        spans=[
            Span(kind="model", name="turn 0", start_s=0.0, end_s=1.0),
            Span(kind="user", name="user", start_s=1.0, end_s=8.0),
        ],
    )  # fmt: skip
    t = dataclasses.replace(first, turns=[*first.turns, *with_calls(call("user", 2.0)).turns])
    metrics, _ = rollout_metrics([t], seconds=10.0)
    assert metrics["tools/user/seconds_p50"] == pytest.approx(2.0)


def test_no_engine_figures_where_the_engine_has_none():
    metrics, _ = rollout_metrics([with_calls()], seconds=1.0)
    told = {name for name in metrics if name.startswith(("engine/", "tools/add"))}
    assert told == {"engine/retries"}


PAGE = DOCS / "metrics.md"


def named_in_page(heading):
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def general(name):
    """The name as the page has it: any tool, any stop reason."""
    name = re.sub(r"^tools/[^/]+/", "tools/{tool}/", name)
    return re.sub(r"^rollout/stop_reason/.+", "rollout/stop_reason/{reason}", name)


def test_the_page_and_the_code_name_the_same_metrics(agent_path, tmp_path):
    log = train(agent_path, tmp_path, max_steps=1, beta=0.01).state.log_history[0]
    offline, _ = rollout_metrics([with_calls(call("add", 1.0))], seconds=1.0, stats=STATS)
    ours = (
        "completions/", "rollout/", "tools/", "engine/", "sampling/logprob_gap", "sampling/po",
        "shared_prefix/",
    )  # fmt: skip
    named = {general(name) for name in {*log, *offline} if name.startswith(ours)}
    assert named_in_page("Of the rollout") == named
    assert named_in_page("TRL's own") <= log.keys()


@pytest.mark.vllm
def test_vllm_tells_of_its_queue_and_cache(vllm_engine, agent_path):
    before = vllm_engine.stats()
    prompt = AutoTokenizer.from_pretrained(agent_path).encode("What is 1 + 1? " * 20)
    ids = torch.tensor([prompt] * 2)
    for _ in range(2):
        vllm_engine.rollout(ids, torch.ones_like(ids), 2, max_new_tokens=4)
    stats = vllm_engine.stats().since(before)
    assert stats.num_prompt_tokens == 8 * len(prompt)
    assert 0 < stats.num_cached_tokens < stats.num_prompt_tokens
    assert stats.num_steps >= 4 and stats.num_waiting >= 0
