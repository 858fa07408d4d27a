"""AgentGRPOConfig: its checks, and the limits that it makes."""

import pytest
from transformers import HfArgumentParser

from agent_vllm.settings import Limits
from trl_integration import AgentGRPOConfig


def config(tmp_path, **options):
    return AgentGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


def test_limits_by_default(tmp_path):
    defaults = config(tmp_path)
    assert defaults.limits() == Limits(
        max_turns=None, max_completion_tokens=defaults.max_completion_length
    )


def test_every_limit_has_a_setting(tmp_path):
    limits = config(
        tmp_path,
        max_turns=3,
        max_new_tokens=32,
        max_completion_length=100,
        max_tool_calling_iterations=2,
        max_invalid_calls=4,
        max_tool_result_tokens=20,
        tool_timeout_s=1.5,
        turn_deadline_s=20.0,
        deadline_s=60.0,
    ).limits()
    assert limits == Limits(
        max_turns=3,
        max_new_tokens=32,
        max_completion_tokens=100,
        max_tool_rounds=2,
        max_invalid_calls=4,
        max_tool_result_tokens=20,
        tool_timeout_s=1.5,
        turn_deadline_s=20.0,
        deadline_s=60.0,
    )


def test_zero_turns_are_not_taken_for_unset(tmp_path):
    limits = config(tmp_path, max_turns=0, max_tool_calling_iterations=0).limits()
    assert (limits.max_turns, limits.max_tool_rounds) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"old_logprobs": "learner"}, "`old_logprobs` must be one of .*got 'learner'"),
        ({"thinking_ratio": -0.1}, r"`thinking_ratio` must be in \[0, 1\], got -0.1"),
        ({"on_engine_death": "ignore"}, "`on_engine_death` must be one of .*got 'ignore'"),
        (
            {"max_new_tokens": 9, "max_completion_length": 8},
            "`max_new_tokens` must be at most `max_completion_length`, got 9 and 8: it can't be "
            "reached. Lower `max_new_tokens` or raise `max_completion_length`.",
        ),
        ({"max_turns": -1}, "`max_turns` must be 0 or more, got -1"),
        ({"tool_timeout_s": 0.0}, "`tool_timeout_s` must be more than 0, got 0.0"),
    ],
)
def test_wrong_settings(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


def test_from_the_command_line(tmp_path):
    arguments = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    arguments += ["--max_turns", "2", "--rollout_engine_kwargs", '{"max_num_seqs": 8}']
    (parsed,) = HfArgumentParser(AgentGRPOConfig).parse_args_into_dataclasses(arguments)
    assert parsed.max_turns == 2
    assert parsed.rollout_engine_kwargs == {"max_num_seqs": 8}
