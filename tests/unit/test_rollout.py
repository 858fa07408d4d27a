"""One trajectory's story: tokens, masks, limits, endings. Every engine here is scripted."""

import asyncio
import threading

import pytest
from fakes import (
    ADD,
    END,
    NUM_ADD,
    PAD,
    add,
    broken_invariants,
    by_prompt,
    call,
    difference,
    ids_of,
    shout,
    tail,
    user,
)

from agent_vllm.chat import ChatFormat
from agent_vllm.rollout import rollout_batch, rollout_single
from agent_vllm.settings import Limits
from agent_vllm.tools import Tool, as_tool
from agent_vllm.training import collate
from agent_vllm.types import StopReason

# ---- the story ----


def test_a_call_and_an_answer(chat, scripted):
    engine = scripted([ADD, "3"])
    t = rollout_single(engine, chat, user("sum"), [add])
    assert tail(chat, t) == (
        f"{ADD}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    )
    assert (t.stop_reason, t.num_turns, t.error) == (StopReason.ANSWERED, 2, None)
    assert t.turn_outputs == [ADD, "3"]
    assert [m["role"] for m in t.messages] == ["user", "assistant", "tool", "assistant"]
    assert t.completion_messages == t.messages[1:]
    assert [(span.kind, span.name) for span in t.spans] == [
        ("model", "turn 0"),
        ("tool", "add"),
        ("model", "turn 1"),
    ]
    assert broken_invariants(t, engine.requests) == []


def test_sampled_end_tokens_are_trained_and_written_ones_are_not(chat, scripted):
    t = rollout_single(scripted([ADD, "3"]), chat, user(), [add])
    ends = [bit for id, bit in zip(t.completion_ids, t.completion_mask, strict=True) if id == END]
    # columns:     turn tool answer
    assert ends == [1, 0, 1]


def test_mask_over_the_whole_story(chat, scripted):
    t = rollout_single(scripted([ADD, "3"]), chat, user(), [add])
    num_written = len("\n") + len("|tool\n3") + len("|\n") + len("|assistant\n")
    # columns:                    turn             result, header      3  E
    assert t.completion_mask == [1] * NUM_ADD + [0] * num_written + [1, 1]


@pytest.mark.parametrize(
    "turn",
    [
        '<tool_call>{ "arguments": {"b":2 , "a" :1},"name":"add"}</tool_call>',
        '<tool_call>\n\n{"name": "add", "arguments": {"a": 1, "\\u00e9": 3}}</tool_call>\n ',
        "a" * 30 + ADD,
    ],
)
def test_sampled_ids_are_kept_as_they_are(chat, scripted, turn):
    engine = scripted([turn, "ok"])
    t = rollout_single(engine, chat, user(), [add])
    turn_ids = engine.encode_turn(turn)
    assert difference(t.segments[0].token_ids, turn_ids) is None
    second = engine.requests[1].prompt_ids
    assert difference(second[: len(t.prompt_ids) + len(turn_ids)], t.prompt_ids + turn_ids) is None
    assert "tool_calls" in t.messages[1]


def test_ids_keep_every_control_token_that_reading_takes_out(chat, scripted):
    turn = f"<think>hm</think>{ADD}"
    engine = scripted([turn, "ok"])
    t = rollout_single(engine, chat, user(), [add])
    assert t.messages[1]["content"] == ""
    assert t.segments[0].token_ids == engine.encode_turn(turn)
    assert t.turn_outputs[0] == turn


def test_any_end_token_ends_a_turn(tokenizer, scripted):
    end_of_text = tokenizer.pad_token_id
    chat = ChatFormat.from_tokenizer(tokenizer, eos_token_ids=[end_of_text])
    turns = [[*ids_of(tokenizer, ADD), end_of_text], [*ids_of(tokenizer, "3"), end_of_text]]
    engine = scripted(turns, eos_token_ids=[end_of_text])
    t = rollout_single(engine, chat, user(), [add])
    assert (t.stop_reason, t.turn_outputs) == (StopReason.ANSWERED, [ADD, "3"])
    observation = t.segments[1].token_ids
    assert (observation[0], t.completion_mask[NUM_ADD]) == (END, 0)  # the template's own end


def test_two_calls_are_answered_in_order(chat, scripted):
    both = ADD + call("shout", text="hey")
    t = rollout_single(scripted([both, "ok"]), chat, user(), [add, shout])
    assert [m["content"] for m in t.messages if m["role"] == "tool"] == ["3", "HEY"]
    assert "tool\n3<|im_end|>\n<|im_start|>tool\nHEY<|im_end|>" in tail(chat, t)


def test_a_malformed_call_is_answered_and_the_loop_goes_on(chat, scripted):
    t = rollout_single(scripted(["<tool_call>{oops</tool_call>", ADD, "3"]), chat, user(), [add])
    assert [r.status for r in t.tool_results] == ["invalid", "ok"]
    assert (t.stop_reason, t.num_turns) == (StopReason.ANSWERED, 3)
    assert "not valid JSON" in t.messages[2]["content"]


def test_a_call_of_a_name_that_no_tokenizer_takes(chat, scripted):
    engine = scripted(['<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>', "ok"])
    t = rollout_single(engine, chat, user(), [add])
    assert [r.status for r in t.tool_results] == ["invalid"]
    assert t.stop_reason == StopReason.ANSWERED


# ---- limits and endings ----


@pytest.mark.parametrize("max_turns", [0, 1, 3])
def test_max_turns_ends_the_trajectory_after_the_results(chat, scripted, max_turns):
    engine = scripted([ADD])
    t = rollout_single(engine, chat, user(), [add], limits=Limits(max_turns=max_turns))
    assert t.stop_reason == StopReason.MAX_TURNS
    assert (t.num_turns, len(t.tool_results), len(engine.requests)) == (max_turns,) * 3
    assert [m["role"] for m in t.completion_messages] == ["assistant", "tool"] * max_turns
    assert not tail(chat, t).endswith("assistant\n")  # nobody is asked again
    assert broken_invariants(t, engine.requests) == []


@pytest.mark.parametrize("max_rounds", [0, 1, 3])
def test_calls_after_the_last_tool_round_are_not_answered(chat, scripted, max_rounds):
    t = rollout_single(
        scripted([ADD]), chat, user(), [add], limits=Limits(max_tool_rounds=max_rounds)
    )
    assert t.stop_reason == StopReason.MAX_TURNS
    assert (t.num_turns, len(t.tool_results)) == (max_rounds + 1, max_rounds)
    assert "tool_calls" in t.messages[-1]  # the last call stays, unanswered


def test_unknown_tools_end_after_max_invalid_calls(chat, scripted):
    t = rollout_single(
        scripted([call("nope")]), chat, user(), [add], limits=Limits(max_invalid_calls=2)
    )
    assert (t.stop_reason, t.num_turns) == (StopReason.INVALID_CALLS, 2)
    assert "Unknown tool" in t.messages[-1]["content"]


def test_a_valid_call_starts_the_count_again(chat, scripted):
    turns = [call("nope"), ADD, call("nope"), "ok"]
    t = rollout_single(scripted(turns), chat, user(), [add], limits=Limits(max_invalid_calls=2))
    assert t.stop_reason == StopReason.ANSWERED


def test_a_row_has_its_own_tools_only(chat, scripted):
    script = by_prompt(
        chat, one=[call("shout", text="x"), "ok"], two=[call("shout", text="x"), "ok"]
    )
    first, second = rollout_batch(
        scripted(script), chat, [user("one"), user("two")], [[add], [add, shout]]
    )
    assert [r.status for r in first.tool_results] == ["invalid"]
    assert [r.content for r in second.tool_results] == ["X"]


def test_a_tool_that_ends_the_episode(chat, scripted):
    final = Tool(schema=as_tool(shout).schema, function=shout, ends_episode=True)
    engine = scripted(by_prompt(chat, one=[call("shout", text="x")], two=[ADD, "3"]))
    first, second = rollout_batch(
        engine, chat, [user("one"), user("two")], [[final, add], [final, add]]
    )
    assert (first.stop_reason, first.num_turns) == (StopReason.ENVIRONMENT_DONE, 1)
    assert first.messages[-1] == {"role": "tool", "name": "shout", "content": "X"}
    assert tail(chat, first).endswith("tool\nX<|im_end|>\n")
    assert (second.stop_reason, second.num_turns) == (StopReason.ANSWERED, 2)


def test_a_failed_final_call_does_not_end_it(chat, scripted):
    final = Tool(schema=as_tool(shout).schema, function=shout, ends_episode=True)
    t = rollout_single(scripted([call("shout", volume=3), "ok"]), chat, user(), [final])
    assert (t.stop_reason, t.num_turns) == (StopReason.ANSWERED, 2)


def test_prompts_that_leave_no_room_end_unasked(chat, scripted):
    short = len(chat.prompt_ids(user("")))
    engine = scripted(["ok"], max_model_len=64)
    prompts = [user("x" * (size - short)) for size in (short + 3, 64, 200)]
    trajectories = rollout_batch(engine, chat, prompts)
    assert [t.stop_reason for t in trajectories] == [
        StopReason.ANSWERED,
        StopReason.CONTEXT_FULL,
        StopReason.CONTEXT_FULL,
    ]
    assert [t.completion_ids for t in trajectories][1:] == [[], []]
    assert [len(t.prompt_ids) for t in trajectories] == [short + 3, 64, 200]
    assert len(engine.requests) == 1


def test_a_prompt_is_never_cut(chat, scripted):
    prompts = [user("x" * 200), user("y")]
    batch = collate(rollout_batch(scripted(["ok"], max_model_len=64), chat, prompts), PAD)
    lengths = [len(chat.prompt_ids(prompt)) for prompt in prompts]
    assert batch.attention_mask.sum(dim=1).tolist() == [lengths[0], lengths[1] + len("ok") + 1]


def test_a_turn_cut_by_its_own_limit(chat, scripted):
    engine = scripted([ADD])
    t = rollout_single(engine, chat, user(), [add], limits=Limits(max_new_tokens=NUM_ADD - 2))
    assert t.stop_reason == StopReason.TURN_LENGTH
    assert t.completion_mask == [1] * (NUM_ADD - 2)
    assert t.tool_results == []


def test_a_cut_turn_runs_nothing_even_if_its_call_is_whole(chat, scripted):
    engine = scripted([ADD + "and so on"])
    t = rollout_single(engine, chat, user(), [add], limits=Limits(max_new_tokens=NUM_ADD + 3))
    assert (t.stop_reason, t.tool_results) == (StopReason.TURN_LENGTH, [])
    assert t.messages[-1] == {"role": "assistant", "content": ADD + "and "}


def test_a_turn_gets_what_is_left_of_the_whole(chat, scripted):
    engine = scripted([ADD, "x" * 32])
    limits = Limits(max_new_tokens=60, max_completion_tokens=90)
    t = rollout_single(engine, chat, user(), [add], limits=limits)
    num_observed = len(t.segments[1].token_ids)
    assert [r.max_new_tokens for r in engine.requests] == [60, 90 - NUM_ADD - num_observed]
    assert t.stop_reason == StopReason.COMPLETION_BUDGET
    assert len(t.completion_ids) == 90


def _num_until_second_turn(chat, engine):
    t = rollout_single(engine, chat, user(), [add])
    return len(t.segments[0].token_ids) + len(t.segments[1].token_ids)


@pytest.mark.parametrize(
    ("num_left", "num_turns"), [(-1, 1), (0, 1), (1, 2)], ids=["less", "nothing", "one"]
)
def test_no_request_without_room(chat, scripted, num_left, num_turns):
    needed = _num_until_second_turn(chat, scripted([ADD, "3"]))
    engine = scripted([ADD, "3"])
    limits = Limits(max_completion_tokens=needed + num_left)
    t = rollout_single(engine, chat, user(), [add], limits=limits)
    assert t.stop_reason == StopReason.COMPLETION_BUDGET
    assert len(engine.requests) == num_turns
    assert len(t.segments) == 2 * num_turns - 1  # without a next turn the result stays out too
    assert [r.max_new_tokens for r in engine.requests[1:]] == [1] * (num_turns - 1)
    assert broken_invariants(t, engine.requests) == []


def test_the_context_is_a_limit_too(chat, scripted):
    num_prompt = len(chat.prompt_ids(user(), [as_tool(add)]))
    engine = scripted([ADD, "x" * 50], max_model_len=num_prompt + 100)
    t = rollout_single(engine, chat, user(), [add])
    assert t.stop_reason == StopReason.CONTEXT_FULL
    assert len(t.prompt_ids + t.completion_ids) == num_prompt + 100


def fill(num: int) -> str:
    """
    Fill.

    Args:
        num: how much
    """
    return "9" * num


def test_a_huge_result_is_cut_in_tokens_and_marked(chat, scripted):
    engine = scripted([call("fill", num=3000), "ok"])
    limits = Limits(max_tool_result_tokens=64)
    t = rollout_single(engine, chat, user(), [fill], limits=limits)
    content = t.messages[2]["content"]
    assert content == "9" * (64 - len("\n[... 2959 tokens cut]")) + "\n[... 2958 tokens cut]"
    assert f"tool\n{content}<|im_end|>" in tail(chat, t)
    assert t.tool_results[0].content == "9" * 3000
    assert t.stop_reason == StopReason.ANSWERED


def test_without_a_limit_a_huge_result_is_cut_to_what_fits(chat, scripted):
    engine = scripted([call("fill", num=200_000), "okay"], max_model_len=1024)
    t = rollout_single(engine, chat, user(), [fill])
    assert t.messages[2]["content"].endswith("tokens cut]")
    assert t.stop_reason == StopReason.CONTEXT_FULL
    assert len(t.prompt_ids + t.completion_ids) <= 1024
    assert broken_invariants(t, engine.requests) == []


def test_parallel_results_share_what_is_left(chat, scripted):
    engine = scripted([call("fill", num=900) * 2, "ok"], max_model_len=1024)
    t = rollout_single(engine, chat, user(), [fill])
    contents = [m["content"] for m in t.messages if m["role"] == "tool"]
    assert len(contents) == 2 and contents[0] == contents[1]
    assert contents[0].endswith("tokens cut]")


def test_a_turn_that_is_being_sampled_at_the_deadline_is_given_up(chat, scripted):
    """Earlier turns stay; the request is taken out of the engine."""
    engine = scripted([ADD, "never"])
    sample = engine._sample

    async def stall(request):
        if len(engine.requests) == 1:
            await asyncio.Event().wait()
        return await sample(request)

    engine._sample = stall
    t = rollout_single(engine, chat, user(), [add], limits=Limits(deadline_s=0.2))
    assert t.stop_reason is StopReason.DEADLINE
    assert [segment.is_sampled for segment in t.segments] == [True, False]
    assert t.error is None


def test_deadline_between_turns(chat, scripted):
    """The clock is past the deadline once the tool has run."""
    release = threading.Event()

    def wait() -> str:
        """Wait."""
        release.wait(5)

    t = rollout_single(
        scripted([call("wait")]), chat, user(), [wait], limits=Limits(deadline_s=0.1)
    )
    release.set()
    assert t.stop_reason == StopReason.DEADLINE
    assert [r.status for r in t.tool_results] == ["failed"]
    assert "Timed out" in t.tool_results[0].content
