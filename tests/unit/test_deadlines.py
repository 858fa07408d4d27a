"""Time that runs out: of a turn, and of one trajectory in a batch whose group goes on."""

import asyncio
import threading

import pytest
from fakes import ADD, NUM_ADD, PAD, add, call, user

from agent_vllm.rollout import rollout_batch, rollout_single
from agent_vllm.settings import Limits
from agent_vllm.types import StopReason
from trl_integration.fields import exclusion, to_trl


@pytest.fixture
def stuck():
    """A tool that comes back at the test's end."""
    end = threading.Event()

    def wait() -> str:
        """Wait."""
        end.wait(30)
        return "late"

    yield wait
    end.set()


def test_calls_past_the_turns_deadline_time_out_and_the_next_turn_has_its_own(
    chat, scripted, stuck
):
    engine = scripted([call("wait"), call("wait") + ADD, "done"])
    limits = Limits(turn_deadline_s=1.0)
    t = rollout_single(engine, chat, user(), [stuck, add], limits=limits)
    assert t.stop_reason is StopReason.ANSWERED
    assert [(r.name, r.status) for r in t.tool_results] == [
        ("wait", "failed"),
        ("wait", "failed"),
        ("add", "ok"),
    ]
    assert all("Timed out" in r.content for r in t.tool_results[:2])


def test_a_users_reply_is_bounded_by_the_turn(chat, scripted, stuck):
    t = rollout_single(
        scripted(["hello"]),
        chat,
        user(),
        user=lambda messages: stuck(),
        limits=Limits(turn_deadline_s=1.0),
    )
    assert t.stop_reason is StopReason.USER_ERROR
    assert t.error.startswith("Timed out")


def num_trained_tokens(group, exclusions):
    return [sum(mask) for mask in to_trl(group, PAD, exclusions).tool_mask]


def test_a_straggler_is_closed_with_what_it_has_and_its_group_stays(chat, scripted):
    """The third of four samples stalls in its second turn."""
    engine = scripted(lambda request: engine.encode_turn(turn_of(request)))

    def turn_of(request):
        return "three" if "<tool_call>" in chat.tokenizer.decode(request.prompt_ids) else ADD

    sample, second_turns = engine._sample, []

    async def stall(request):
        if turn_of(request) == "three":
            second_turns.append(request)
            if len(second_turns) == 3:
                await asyncio.Event().wait()
        return await sample(request)

    engine._sample = stall
    group = rollout_batch(
        engine, chat, [user()], [[add]], num_generations=4, limits=Limits(deadline_s=2.0)
    )
    (late,) = [t for t in group if t.stop_reason is not StopReason.ANSWERED]
    assert (late.stop_reason, late.unfinished, late.error) == (StopReason.DEADLINE, True, None)
    assert late.completion_mask.count(1) == NUM_ADD
    assert late.logprobs == [-0.5 if bit else 0.0 for bit in late.completion_mask]
    whole = next(t for t in group if t is not late)
    assert late.completion_ids == whole.completion_ids[: len(late.completion_ids)]
    num_trained = [NUM_ADD if t is late else NUM_ADD + len("three") + 1 for t in group]
    assert num_trained_tokens(group, [None] * len(group)) == num_trained
    excluded = [exclusion(t, mask_truncated=True) for t in group]
    masked = num_trained_tokens(group, excluded)
    assert masked == [0 if t is late else num for t, num in zip(group, num_trained, strict=True)]
