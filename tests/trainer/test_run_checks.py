"""Runs that learn nothing say so: the checks on rollouts made by hand, and in the real trainer."""

import functools
import math

import pytest
import torch
from accelerate import Accelerator
from fakes import add, call, sampled, trajectory
from tiny_tasks import calculator

from agent_vllm.errors import RunCheckError
from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.types import StopReason, ToolResult
from trl_integration.run_checks import RunChecks
from trl_integration.training_rollout import TrainingRollout

BROKEN = ToolResult(name="add", content="Error: no such file", status="failed")
SUM = ToolResult(name="add", content="3", status="ok")
CALL = call("calculator", expression="1 + 2")
RIGHT = [[0.0, 1.0], [1.0, 1.0]] * 2  # two groups of two rows


def rollout(*, results=(SUM,), reason=StopReason.ANSWERED, rewards=RIGHT, error=None):
    """A rollout of four rows that are alike."""
    made = TrainingRollout(
        mode="train", step=0, seed=0, rows=[{}] * 4, tools=[[add]] * 4, rewards=torch.empty(0)
    )
    row = trajectory(
        [1], sampled(3, 9), stop_reason=reason, tool_results=results, turn_outputs=("",),
        error=error,
    )  # fmt: skip
    made.finish([row] * 4, mask_truncated=True)
    made.score(torch.tensor(rewards))
    return made


def warnings(rollouts, capsys):
    checks = RunChecks(
        Accelerator(cpu=True), on_warning="warn", reward_names=["right", "form"], num_generations=2
    )
    for one in rollouts:
        checks.see(one)
    return capsys.readouterr().out.splitlines()


def test_a_run_that_learns_is_not_warned_of(capsys):
    assert warnings([rollout()] * 30, capsys) == []


def test_a_tool_that_nearly_always_fails_is_named_once_with_its_first_error(capsys):
    often = rollout(results=(BROKEN, BROKEN, BROKEN))
    (line,) = warnings([often] * 3, capsys)
    assert line.startswith("Warning: 12 of 12 calls of the tool 'add' failed, the first with: ")
    assert "'Error: no such file'" in line
    assert warnings([rollout(results=(BROKEN, SUM, SUM))] * 3, capsys) == []
    assert warnings([rollout(results=(BROKEN,))], capsys) == []  # four calls are too few


def test_a_tool_that_is_never_called_is_named(capsys):
    assert warnings([rollout(results=())] * 19, capsys) == []
    (line,) = warnings([rollout(results=())] * 25, capsys)
    assert line.startswith("Warning: The tools ['add'] were offered in the last 20 rollouts")


def test_nearly_no_trained_token_names_the_reasons(capsys):
    lost = rollout(reason=StopReason.ENGINE_ERROR, error="lost", rewards=[[math.nan] * 2] * 4)
    assert warnings([lost, rollout(), lost, lost], capsys) == []
    (line,) = warnings([lost] * 4, capsys)
    assert line.startswith("Warning: 0 of 24 sampled tokens of the last 3 rollouts are trained")
    assert "{'failed': 24}. The first failure is: lost." in line


@pytest.mark.parametrize(
    ("reason", "setting"),
    [
        (StopReason.MAX_TURNS, "max_turns"),
        (StopReason.INVALID_CALLS, "max_invalid_calls"),
    ],
)
def test_most_trajectories_at_one_limit_name_the_setting(reason, setting, capsys):
    assert warnings([rollout(reason=reason)] * 4 + [rollout()], capsys) == []
    (line,) = warnings([rollout(reason=reason)] * 6, capsys)
    assert line.startswith("Warning: 20 of 20 trajectories of the last 5 rollouts ended as ")
    assert setting in line


def test_equal_rewards_are_noticed_after_ten_rollouts(capsys):
    equal = rollout(rewards=[[1.0, 0.5], [1.0, 0.5], [0.0, 0.5], [0.0, 0.5]])  # within groups
    assert warnings([rollout(), *[equal] * 9], capsys) == []
    (line,) = warnings([equal] * 11, capsys)
    assert line.startswith("Warning: In the last 10 rollouts all samples of a prompt got equal")
    assert "{'right': 1.0, 'form': 0.5}" in line


def test_a_reward_function_that_returns_only_none_is_named(capsys):
    silent = rollout(rewards=[[value, math.nan] for value, _ in RIGHT])
    assert warnings([silent, silent, rollout()], capsys) == []
    (line,) = warnings([silent] * 4, capsys)
    assert line.startswith("Warning: The reward function 'form' returned only None in the last 3")


# ---- in the real trainer ----


@functools.wraps(calculator)
def broken(*_, **__):
    raise FileNotFoundError("calculator.db")


def no_reward(completions, **_):
    return [None] * len(completions)


def alternating_reward(completions, **_):
    return [float(index % 2) for index in range(len(completions))]


@pytest.mark.parametrize("on_warning", ["warn", "stop"])
def test_a_run_on_error_messages_warns_or_stops(new_trainer, agent, on_warning, capfd):
    def script(request):  # one call per trajectory
        has_called = CALL in agent[1].decode(request.prompt_ids)
        return engine.encode_turn("Done." if has_called else CALL)

    engine = ScriptedRolloutEngine(agent[1], script)
    trainer = new_trainer(
        engine,
        tools=[broken],
        reward_funcs=[alternating_reward, no_reward],
        max_turns=3,
        max_steps=4,
        on_warning=on_warning,
    )
    if on_warning == "stop":
        with pytest.raises(RunCheckError, match=r"calls of the tool 'calculator' failed"):
            trainer.train()
        assert trainer.state.global_step < 3
        return
    trainer.train()
    assert trainer.state.global_step == 4
    lines = capfd.readouterr().out.splitlines()
    (fails, silent) = (line for line in lines if line.startswith("Warning: "))
    assert "calls of the tool 'calculator' failed, the first with: " in fails
    assert "calculator.db" in fails and "'no_reward' returned only None" in silent
