"""Exported records: whole in Parquet, or rows that SFTTrainer takes."""

import json
import math

import pytest
from datasets import load_dataset
from fakes import ADD, add, observed, sampled, trajectory, user

from agent_vllm.cli import main
from agent_vllm.errors import EmptyRecordError, RecordError
from agent_vllm.record import RolloutRecorder, read_rollouts
from agent_vllm.record.export import write_parquet
from agent_vllm.record.sft import NO_LABEL as NO
from agent_vllm.rollout import rollout_single

TOOLS_FILE = """
def add(a: int, b: int) -> int:
    \"\"\"Adds.

    Args:
        a: One.
        b: Other.
    \"\"\"
    return a + b
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rollouts.jsonl"


def record(path, *trajectories, tokenizer=None, **options):
    """Write and read back; `options` are fields."""
    with RolloutRecorder(path, tokenizer=tokenizer) as recorder:
        for t in trajectories:
            recorder.write(t, **options)
    return list(read_rollouts(path))


def rows_of(output):
    return list(load_dataset("parquet", data_files=str(output), split="train"))


@pytest.fixture
def scored(path):
    """Three trajectories with rewards 0, 1 and 2 in all; the last has two turns."""
    two_turns = trajectory([1, 2], sampled(3, 4), observed(5), sampled(6))
    with RolloutRecorder(path) as recorder:
        for rewards, t in (
            ({"right": 0.0}, trajectory([1], sampled(2))),
            ({"right": 1.0, "short": None}, trajectory([1], sampled(3))),
            ({"right": 1.0, "short": 1.0}, two_turns),
        ):
            recorder.write(t, rewards=rewards)
    return path


def test_parquet_holds_the_same_records(path, chat, scripted, capsys):
    t = rollout_single(scripted([ADD, "汉"]), chat, user("\ud83d"), [add])
    options = {"tokenizer": chat.tokenizer, "row": {"mixed": [1, "a", None]}}
    record(path, t, step=1, rewards={"a": None, "b": math.inf}, **options)
    lines = record(path, trajectory([1]), learner_logprobs=[], **options)
    output = path.with_suffix(".parquet")
    assert main(["export", str(path), str(output)]) == 0
    assert f"wrote 2 trajectories to {output}" in capsys.readouterr().out
    assert list(read_rollouts(output)) == lines
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, output.name]


def test_an_export_goes_to_parquet_only(path):
    with pytest.raises(SystemExit, match=r"must end in .parquet, got out.csv"):
        main(["export", str(path), "out.csv"])


# ---- rows for supervised fine-tuning ----


def test_sampled_tokens_alone_have_labels(scored, tmp_path):
    output = tmp_path / "sft.parquet"
    assert write_parquet(scored, output, to="sft", where="turns == 2") == 1
    #                       P   P a0 a0 o0 a1
    assert rows_of(output) == [{"input_ids": [1, 2, 3, 4, 5, 6], "labels": [NO, NO, 3, 4, NO, 6]}]


@pytest.mark.parametrize(
    ("where", "last_ids"),
    [
        ("reward >= 1", [3, 6]),
        ("reward > 1 and turns > 1", [6]),
        ("right == 0", [2]),
        ("short >= 0", [6]),  # a function that gave None matches no comparison
        ("stop_reason == 'answered'", [2, 3, 6]),
        ("not trained & sampled_tokens < 2", [2, 3]),
    ],
)
def test_an_expression_chooses_trajectories(scored, tmp_path, where, last_ids):
    write_parquet(scored, tmp_path / "sft.parquet", to="sft", where=where)
    assert [row["input_ids"][-1] for row in rows_of(tmp_path / "sft.parquet")] == last_ids


@pytest.mark.parametrize("where", ["reward >=", "rewrad > 1", "reward", "True", "a = 1", ""])
def test_an_expression_that_can_not_be_read_is_named(scored, tmp_path, where):
    with pytest.raises(RecordError, match="must be an expression") as raised:
        write_parquet(scored, tmp_path / "sft.parquet", to="sft", where=where)
    assert repr(where) in str(raised.value)
    assert "each reward function by its name" in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == [scored.name]


def test_an_expression_that_matches_nothing_says_how_far_rewards_go(scored, tmp_path):
    with pytest.raises(EmptyRecordError, match=r"none of the 3 .* highest reward is 2\.0"):
        write_parquet(scored, tmp_path / "sft.parquet", to="sft", where="reward > 5")


def test_trajectories_without_a_sampled_token_are_left_out(path, tmp_path):
    record(path, trajectory([1]), trajectory([1], sampled(2)))
    assert write_parquet(path, tmp_path / "sft.parquet", to="sft") == 1


def test_a_record_in_which_nothing_was_sampled_is_an_error(path, tmp_path):
    record(path, trajectory([1]))
    with pytest.raises(EmptyRecordError, match="has a sampled token"):
        write_parquet(path, tmp_path / "sft.parquet", to="sft")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_redacted_tokens_are_refused(path, tmp_path):
    record(path, trajectory([1, -1], sampled(2)))
    with pytest.raises(RecordError, match="rollout-0-0-0 has redacted tokens"):
        write_parquet(path, tmp_path / "sft.parquet", to="sft")


def test_messages_keep_their_own_keys_and_get_the_schemas_of_their_tools(
    path, tmp_path, chat, scripted
):
    t = rollout_single(scripted([ADD, "It is 3."]), chat, user(), [add])
    other = rollout_single(scripted(["Hello."]), chat, user(), [])
    with RolloutRecorder(path, tokenizer=chat.tokenizer) as recorder:
        recorder.write(t, tools=["add"])
        recorder.write(other)
    (tools := tmp_path / "tools.py").write_text(TOOLS_FILE)
    output = tmp_path / "sft.parquet"
    assert (
        main(["export", str(path), str(output), "--to", "sft-messages", "--tools", str(tools)]) == 0
    )
    first, second = rows_of(output)
    assert first["messages"] == t.messages
    assert second == {"messages": other.messages, "tools": []}
    [schema] = first["tools"]
    assert schema["function"]["name"] == "add"
    assert json.dumps(schema["function"]["parameters"]["required"]) == '["a", "b"]'


def test_a_tool_without_a_definition_is_named(path, tmp_path):
    record(path, trajectory([1], sampled(2)), tools=["add", "search"])
    (tools := tmp_path / "tools.py").write_text(TOOLS_FILE)
    with pytest.raises(RecordError, match="none named 'search', which rollout-0-0-0 has"):
        write_parquet(path, tmp_path / "sft.parquet", to="sft-messages", tools=tools)


@pytest.mark.parametrize("options", [["--to", "sft-messages"], ["--tools", "tools.py"]])
def test_tools_are_for_messages_and_messages_need_tools(scored, tmp_path, options):
    with pytest.raises(SystemExit, match="must be given with `--to sft-messages` alone"):
        main(["export", str(scored), str(tmp_path / "sft.parquet"), *options])
