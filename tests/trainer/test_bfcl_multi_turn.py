"""The tasks in `examples/bfcl_multi_turn.py`: the ground truth passes all of them, through the
whole rollout, and what departs from it fails."""

import json
from importlib.util import find_spec

import pytest
from datasets import Dataset
from fakes import CHATML, broken_invariants, byte_tokenizer, call

from agent_vllm.chat import ChatFormat
from agent_vllm.settings import Limits
from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.types import StopReason
from trl_integration import AgentGRPOConfig, AgentGRPOTrainer

if find_spec("bfcl_eval") is None:
    pytest.skip("needs the package bfcl-eval", allow_module_level=True)

from bfcl_multi_turn import (
    MultiTurnEnvironment,
    World,
    evaluate,
    ground_truth_turns,
    load_multi_turn,
    parse_call,
)

# Schemas of dozens of functions a row say nothing here, and are slow to read byte by byte.
WITHOUT_TOOLS = CHATML[CHATML.index("{%- for message in messages %}") :]


@pytest.fixture(scope="module")
def chat():
    return ChatFormat.from_tokenizer(byte_tokenizer(WITHOUT_TOOLS), needs_tools=False)


@pytest.fixture(scope="module")
def rows():
    return load_multi_turn()


def play(chat, row, turns):
    """The verdict, the trajectory and the engine of a policy that says these turns."""
    engine = ScriptedRolloutEngine(chat.tokenizer, turns, max_model_len=1_000_000)
    ((passed, trajectory),) = evaluate(engine, chat, [row], limits=Limits(max_turns=100))
    return passed, trajectory, engine


def test_the_ground_truth_passes_every_task(chat, rows):
    failed = []
    for row in rows:
        turns = ground_truth_turns(row)
        passed, trajectory, engine = play(chat, row, turns)
        whole = (trajectory.stop_reason, trajectory.turn_outputs) == (StopReason.ANSWERED, turns)
        if not (passed and whole and not broken_invariants(trajectory, engine.requests)):
            failed.append(row["id"])
    print(f"the ground truth passes {len(rows) - len(failed)} of {len(rows)} tasks")
    assert (failed, len(rows)) == ([], 199)


def test_a_policy_that_does_nothing_fails(chat, rows):
    assert not any(play(chat, row, ["Done."])[0] for row in rows[:20])


def test_one_call_left_out_or_added_is_seen(chat, rows):
    row = rows[0]
    turns = ground_truth_turns(row)
    calls = turns[0].split("\n</tool_call>\n")
    assert len(calls) == 3
    missing = "\n</tool_call>\n".join(calls[:2]) + "\n</tool_call>"
    assert not play(chat, row, [missing, *turns[1:]])[0]
    harmless = f"{turns[0]}\n{call('ls')}"
    assert play(chat, row, [harmless, *turns[1:]])[0]
    harmful = f"{turns[0]}\n{call('mkdir', dir_name='more')}"
    assert not play(chat, row, [harmful, *turns[1:]])[0]


def test_a_task_that_was_cut_off_is_not_passed(chat, rows):
    turns = ground_truth_turns(rows[0])
    engine = ScriptedRolloutEngine(chat.tokenizer, turns, max_model_len=1_000_000)
    ((passed, trajectory),) = evaluate(engine, chat, rows[:1], limits=Limits(max_turns=7))
    assert (passed, trajectory.stop_reason) == (False, StopReason.MAX_TURNS)


def test_what_a_world_refuses_is_told_to_the_model(chat, rows):
    """Errors that the world returns are its results; what it raises is a failed one."""
    turns = [call("cd", folder="nowhere"), "Done."]
    _, trajectory, _ = play(chat, rows[0], turns)
    assert trajectory.tool_results[0].status == "ok"
    assert "error" in json.loads(trajectory.tool_results[0].content)


def test_worlds_are_apart(rows):
    one, other = World(rows[0]), World(rows[0])
    assert one._instances["GorillaFileSystem"] is not other._instances["GorillaFileSystem"]
    assert not one.passed


def test_excluded_functions_are_not_offered(rows):
    names = [tool.name for tool in World(rows[0]).tools]
    assert "mv" in names and "cp" not in names and len(names) == len(set(names))


@pytest.mark.parametrize("text", ["__import__('os')", "f(g(1))", "f(x=open('a'))", "1 + 1"])
def test_only_calls_with_literals_are_read(text):
    if text.startswith("__"):
        assert parse_call(text) == ("__import__", ["os"], {})  # a name, looked up in the world
        return
    with pytest.raises((AssertionError, ValueError)):
        parse_call(text)


def test_the_ground_truth_has_the_whole_reward_in_the_trainer(agent, rows, tmp_path):
    """And a policy that does nothing has none: the tools, the user and the verdict of each row."""
    model, tokenizer = agent
    row = min(rows[:50], key=lambda row: len(ground_truth_turns(row)))
    idle = {**row, "prompt": [{"role": "user", "content": "Do nothing."}]}
    turns = ground_truth_turns(row)

    def script(request):
        text = tokenizer.decode(request.prompt_ids)
        num_said = text.count("<|im_start|>assistant\n") - 1
        return engine.encode_turn("Done." if "Do nothing." in text else turns[num_said])

    engine = ScriptedRolloutEngine(tokenizer, script, max_model_len=1_000_000)
    args = AgentGRPOConfig(
        str(tmp_path), per_device_train_batch_size=2, num_generations=2, max_steps=1, bf16=False,
        max_turns=100, max_completion_length=100_000, report_to="none", use_cpu=True,
    )  # fmt: skip
    trainer = AgentGRPOTrainer(
        model,
        args=args,
        train_dataset=Dataset.from_list([row]),
        processing_class=tokenizer,
        environment_factory=MultiTurnEnvironment,
        rollout_engine=engine,
    )
    trainer._generate_and_score_completions([row, idle])
    trainer.close()
    assert {t.stop_reason for t in trainer.trajectories} == {StopReason.ANSWERED}
    assert trainer.rollout.rewards.flatten().tolist() == [1.0, 0.0]
