"""Trajectories as TRL's fields: whole lists, excluded rows, reward columns."""

from fakes import PAD, observed, sampled, trajectory

from agent_vllm.types import StopReason, ToolResult
from trl_integration.fields import Exclusion, exclusion, to_trl
from trl_integration.rewards import reward_columns


def test_fields_of_two_rows():
    first = trajectory([1, 2], sampled(3, 9), observed(4, 5), sampled(6, 9))
    second = trajectory([1], sampled(7, 9))
    fields = to_trl([first, second], PAD, [None, None])
    assert fields.prompt_ids == [[1, 2], [1]]
    # columns:                       a0 E  t  t  a1 E
    assert fields.completion_ids == [[3, 9, 4, 5, 6, 9], [7, 9]]
    assert fields.tool_mask == [[1, 1, 0, 0, 1, 1], [1, 1]]
    assert fields.logprobs == [[-0.5, -0.5, 0.0, 0.0, -0.5, -0.5], [-0.5, -0.5]]


def test_completions_are_the_messages_after_the_prompt():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    t = trajectory([1], sampled(9), messages=messages, num_prompt_messages=1)
    assert to_trl([t], PAD, [None]).completions == [messages[1:]]


def test_a_row_without_tokens_gets_one_untrained_pad():
    fields = to_trl([trajectory([1], stop_reason=StopReason.CONTEXT_FULL)], PAD, [None])
    assert fields.completion_ids == [[PAD]]
    assert fields.tool_mask == [[0]]
    assert fields.logprobs == [[0.0]]


def test_excluded_rows_are_masked_whole_and_others_untouched():
    kept = trajectory([1], sampled(3, 9))
    cut = trajectory([1], sampled(3), observed(4), sampled(5), stop_reason=StopReason.TURN_LENGTH)
    excluded = [None, Exclusion.TRUNCATED]
    assert to_trl([kept, cut], PAD, excluded).tool_mask == [[1, 1], [0, 0, 0]]
    assert to_trl([kept, cut], PAD, [None, None]).tool_mask == [[1, 1], [1, 0, 1]]


def test_all_lists_of_a_row_keep_one_length():
    for reason in StopReason:
        t = trajectory([1], sampled(3, 9), observed(4), stop_reason=reason)
        fields = to_trl([t], PAD, [exclusion(t, mask_truncated=True)])
        lengths = map(len, (fields.completion_ids[0], fields.tool_mask[0], fields.logprobs[0]))
        assert list(lengths) == [3, 3, 3], reason


def test_reward_columns():
    results = [
        ToolResult(name="add", content="3", status="ok"),
        ToolResult(name="nope", content="{}", status="invalid"),
        ToolResult(name="add", content="{}", status="failed"),
    ]
    busy = trajectory(
        [1], turn_outputs=["a", "b"], tool_results=results, stop_reason=StopReason.MAX_TURNS
    )
    idle = trajectory([1], turn_outputs=["c"])
    assert reward_columns([busy, idle]) == {
        "stop_reason": ["max_turns", "answered"],
        "turn_outputs": [["a", "b"], ["c"]],
        "num_turns": [2, 1],
        "num_calls": [3, 0],
        "num_invalid_calls": [1, 0],
    }
