"""Many trajectories: isolation, order, seeds, pace, and where a rollout may run."""

import asyncio
import copy
import os
import random
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes import (
    ADD,
    CHATML,
    NUM_ADD,
    add,
    broken_invariants,
    by_prompt,
    call,
    chatml_tokenizer,
    user,
)

from agent_vllm.chat import ChatFormat
from agent_vllm.engines.base import GenerationRequest
from agent_vllm.errors import (
    ChatTemplateError,
    EngineError,
    InvalidRequestError,
    ToolDefinitionError,
)
from agent_vllm.rollout import (
    RolloutStatus,
    rollout_batch,
    rollout_batch_async,
    rollout_single,
    rollout_single_async,
)
from agent_vllm.settings import Limits, SamplingParams
from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.types import StopReason

# ---- isolation ----


def test_an_engine_error_is_one_rows_own(chat, scripted):
    lost, gone = ([EngineError(text)] * 2 for text in ("lost", "gone"))
    script = by_prompt(chat, one=["a"], two=lost, three=[ADD, *gone])
    first, second, third = rollout_batch(
        scripted(script), chat, [user("one"), user("two"), user("three")], [[add]] * 3
    )
    assert [t.stop_reason for t in (first, second, third)] == [
        StopReason.ANSWERED,
        StopReason.ENGINE_ERROR,
        StopReason.ENGINE_ERROR,
    ]
    assert [t.error for t in (first, second, third)] == [None, "lost", "gone"]
    assert second.completion_ids == []
    assert sum(third.completion_mask) == NUM_ADD


def test_the_same_input_again_is_a_fresh_start(chat, scripted):
    """After a tool and the engine failed, nothing of the first try is left in the second."""
    tries = []

    def flaky(a: int) -> int:
        """
        Fail at first.

        Args:
            a: anything
        """
        tries.append(a)
        if len(tries) == 1:
            raise RuntimeError("not yet")
        return a

    messages, tools = [user("one")], [[flaky]]
    turns = [call("flaky", a=7), "done"]
    lost = iter([EngineError("lost")] * 2)

    def script(request):
        is_second = "flaky" in chat.tokenizer.decode(request.prompt_ids).rpartition("one")[2]
        error = next(lost, None) if is_second else None
        return error or engine.encode_turn(turns[is_second])

    engine = scripted(script)
    first, second = (rollout_batch(engine, chat, messages, tools, seed=0)[0] for _ in range(2))
    assert (first.stop_reason, second.stop_reason) == (
        StopReason.ENGINE_ERROR,
        StopReason.ANSWERED,
    )
    assert [m["role"] for m in second.messages] == ["user", "assistant", "tool", "assistant"]
    assert [r.content for r in second.tool_results] == ["7"]
    assert broken_invariants(second, engine.requests[3:]) == []


def test_an_error_of_the_engines_code_is_raised(chat, scripted):
    script = by_prompt(chat, one=["a"], two=[ZeroDivisionError("bug")])
    with pytest.raises(ZeroDivisionError, match="bug"):
        rollout_batch(scripted(script), chat, [user("one"), user("two")])


def test_keyboard_interrupt_in_a_tool_stops_the_run(chat, scripted):
    def interrupt() -> str:
        """Interrupt."""
        raise KeyboardInterrupt

    engine = scripted([call("interrupt"), "never"])
    with pytest.raises(KeyboardInterrupt):
        rollout_single(engine, chat, user(), [interrupt])
    assert len(engine.requests) == 1


@pytest.mark.parametrize("where", ["a script", "a thread", "a notebook"])
def test_what_async_tools_and_users_cache_lives_on_over_rollouts(chat, scripted, where):
    lock, loops = asyncio.Lock(), set()

    async def ask() -> str:
        """Ask the shared client."""
        async with lock:  # an error once it waits on another loop
            await asyncio.sleep(0.01)
            loops.add(asyncio.get_running_loop())
        return "seen"

    async def answer(messages):
        return await ask() if len(messages) < 5 else None

    def rollouts():
        for _ in range(3):
            engine = scripted([f"{call('ask')}\n{call('ask')}", "a", "b"])
            (t,) = rollout_batch(engine, chat, [user()], [[ask]], users_batch=[answer])
            assert [r.content for r in t.tool_results] == ["seen", "seen"]
            assert t.stop_reason is StopReason.ANSWERED

    async def cell():
        rollouts()

    if where == "a script":
        rollouts()
    elif where == "a thread":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(rollouts).result()
    else:
        asyncio.run(cell())
    assert len(loops) == 1


def test_ctrl_c_cancels_what_runs_and_is_raised(chat, scripted):
    cancelled = threading.Event()

    async def wait() -> str:
        """Wait for ever."""
        os.kill(os.getpid(), signal.SIGINT)  # as a terminal does: to the process
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(KeyboardInterrupt):
        rollout_single(scripted([call("wait"), "never"]), chat, user(), [wait])
    assert cancelled.wait(5)


def test_inputs_are_not_written_to(chat, scripted):
    messages = [
        *user("sum"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "name": "add", "content": "3"},
    ]
    batch = [messages] * 4
    before = copy.deepcopy(batch)
    prompts = []
    for _ in range(2):
        trajectories = rollout_batch(
            scripted([ADD]), chat, batch, [[add]] * 4, limits=Limits(max_turns=2)
        )
        prompts += [t.prompt_ids for t in trajectories]
    assert batch == before
    assert all(prompt == prompts[0] for prompt in prompts)


def test_results_are_prompt_major(chat, scripted):
    script = by_prompt(chat, one=["a", "b", "c"], two=["d", "e", "f"])
    trajectories = rollout_batch(
        scripted(script), chat, [user("one"), user("two")], num_generations=3
    )
    assert [t.messages[0]["content"] for t in trajectories] == ["one"] * 3 + ["two"] * 3
    assert [t.turn_outputs[0] for t in trajectories] == list("abcdef")


def test_nobody_is_asked_after_the_end(chat, scripted):
    turns = {"one": ["ok"], "two": [ADD, "ok"], "three": [ADD, ADD, "ok"]}
    engine = scripted(by_prompt(chat, **turns))
    trajectories = rollout_batch(engine, chat, [user(text) for text in turns], [[add]] * 3)
    assert [t.num_turns for t in trajectories] == [1, 2, 3]
    assert len(engine.requests) == 6
    assert rollout_batch(engine, chat, []) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages_batch": [user()], "tools_batch": []}, "one length, got 1 and 0"),
        ({"messages_batch": [user(), []]}, "Conversation 1 is empty"),
        ({"messages_batch": [user()], "num_generations": 0}, "must be 1 or more, got 0"),
        ({"messages_batch": [user()], "thinking_ratio": 1.5}, r"in \[0, 1\], got 1.5"),
    ],
)
def test_wrong_arguments(chat, scripted, arguments, message):
    with pytest.raises(ValueError, match=message):
        rollout_batch(scripted(["ok"]), chat, **arguments)


def test_a_tool_that_can_not_be_described(chat, scripted):
    with pytest.raises(ToolDefinitionError):
        rollout_single(scripted(["ok"]), chat, user(), [lambda a: a])


def test_a_hanging_tool_holds_its_own_row_only(chat, scripted):
    release = threading.Event()

    def wait(seconds: int) -> str:
        """
        Wait.

        Args:
            seconds: how long
        """
        return "slept" if seconds == 0 else str(release.wait(5))

    turns = {text: [call("wait", seconds=0), "ok"] for text in ("one", "two", "three")}
    script = by_prompt(chat, **turns, four=[call("wait", seconds=60), "late"])
    trajectories = rollout_batch(
        scripted(script),
        chat,
        [user(text) for text in ("one", "two", "three", "four")],
        [[wait]] * 4,
        limits=Limits(tool_timeout_s=0.2),
    )
    release.set()
    assert [t.tool_results[0].content for t in trajectories] == [
        *["slept"] * 3,
        '{"error": "Timed out after 0.2 s."}',
    ]
    assert {t.stop_reason for t in trajectories} == {StopReason.ANSWERED}


# ---- thinking and seeds ----


@pytest.mark.parametrize(("ratio", "expected"), [(0, {False}), (1, {True}), (None, {None})])
def test_thinking_for_all_or_none(chat, scripted, ratio, expected):
    trajectories = rollout_batch(
        scripted(["ok"]), chat, [user()], num_generations=8, thinking_ratio=ratio
    )
    assert {t.thinking for t in trajectories} == expected


def test_thinking_for_half_is_drawn_from_the_seed_and_kept(chat, scripted):
    def draw(seed):
        engine = scripted(lambda r: engine.encode_turn(ADD if r.seed % 2 else "ok"))
        return rollout_batch(
            engine,
            chat,
            [user()],
            [[add]],
            40,
            thinking_ratio=0.5,
            seed=seed,
            limits=Limits(max_turns=3),
        )

    first, again, other = draw(1), draw(1), draw(2)
    switches = [t.thinking for t in first]
    assert 10 < sum(switches) < 30
    assert switches == [t.thinking for t in again]
    assert switches != [t.thinking for t in other]
    for t in first:
        text = chat.tokenizer.decode(t.prompt_ids + t.completion_ids)
        num_turns = text.count("<|im_start|>assistant\n")
        assert text.count("assistant\n<think></think>") == (0 if t.thinking else num_turns)


def test_thinking_needs_a_switch(scripted):
    template = CHATML.split("{% if enable_thinking")[0] + "{% endif %}"
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(template))
    with pytest.raises(ChatTemplateError, match="no thinking switch"):
        rollout_single(scripted(["ok"]), chat, user(), thinking_ratio=0.5)


def test_same_seed_same_trajectories_whatever_the_timing(chat, scripted):
    async def jitter() -> str:
        """Wait a moment."""
        await asyncio.sleep(random.random() / 200)
        return "done"

    def draw(seed):
        def script(request):
            if request.seed % 3:
                return engine.encode_turn(call("jitter"))
            return engine.encode_turn(str(request.seed))

        engine = scripted(script)
        trajectories = rollout_batch(
            engine,
            chat,
            [user("a"), user("b")],
            [[jitter]] * 2,
            3,
            seed=seed,
            limits=Limits(max_turns=4),
        )
        seeds = {request.seed for request in engine.requests}
        assert len(seeds) == len(engine.requests)  # every turn of every sample has its own
        return [t.completion_ids for t in trajectories]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_sampling_options_reach_the_engine(chat, scripted):
    engine = scripted(["ok"])
    rollout_single(engine, chat, user(), temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
    (request,) = engine.requests
    assert request.sampling == SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)


@pytest.mark.parametrize("single", [True, False])
def test_bad_sampling_is_refused_before_any_trajectory_starts(chat, scripted, single):
    engine, status = scripted(["ok"]), RolloutStatus()
    with pytest.raises(InvalidRequestError, match="`top_p` must be in"):
        if single:
            rollout_single(engine, chat, user(), top_p=1.5, status=status)
        else:
            rollout_batch(engine, chat, [user()], top_p=1.5, status=status)
    assert (engine.requests, status.num_trajectories) == ([], 0)


def test_trajectories_of_rollouts_side_by_side_have_names_of_their_own(chat, scripted):
    engine = scripted([ADD, "3"])

    async def both():
        await asyncio.gather(
            *(rollout_batch_async(engine, chat, [user()] * 2, [[add]] * 2, 2) for _ in range(2))
        )

    asyncio.run(both())
    names = Counter(request.affinity for request in engine.requests)
    assert len(names) == 2 * 2 * 2 and set(names.values()) <= {1, 2}
    assert all(name.endswith(("row 0, sample 0", "row 0, sample 1", "row 1, sample 0",
                              "row 1, sample 1")) for name in names)  # fmt: skip


class Remembers(ScriptedRolloutEngine):
    """Notes which trajectories are over."""

    def forget(self, affinity):
        self.over = [*getattr(self, "over", []), affinity]


def test_the_engine_is_told_which_trajectories_have_ended(tokenizer, chat):
    engine = Remembers(tokenizer, lambda _: EngineError("no"))
    rollout_batch(engine, chat, [user()], None, 3)
    assert sorted(engine.over) == sorted({request.affinity for request in engine.requests})


def test_ids_are_checked_once(chat, scripted):
    """The first turn's prompt as a whole; then what the engine has not seen: the suffix."""
    engine = scripted([ADD, ADD, "3"])
    t = rollout_single(engine, chat, user(), [add])
    seen = [request.num_checked_ids for request in engine.requests]
    first = len(t.prompt_ids) + len(t.turns[0].segment.token_ids)
    second = first + sum(len(s.token_ids) for s in (t.turns[0].suffix, t.turns[1].segment))
    assert seen == [0, first, second]


def test_an_id_that_was_not_checked_yet_is_refused(chat, scripted):
    """A tool result can't have one; a tokenizer that grew after the engine was built can."""
    engine = scripted([ADD, "3"])
    request = GenerationRequest(
        prompt_ids=[1, 2, engine.vocab_size], num_checked_ids=2, max_new_tokens=1, seed=0
    )
    with pytest.raises(InvalidRequestError, match="out of the engine's vocabulary"):
        asyncio.run(engine.sample(request))


# ---- pace ----


def test_no_barrier_between_turns(chat, scripted):
    """The slow tool returns only once the other trajectory has given its answer."""
    answered = threading.Event()
    turns = {"slow": [call("wait"), "late"], "fast": [ADD, ADD, ADD, "done"]}
    script = by_prompt(chat, **turns)

    def watched(request):
        ids = script(request)
        if chat.decode_turn(ids) == "done":
            answered.set()
        return ids

    def wait() -> bool:
        """Wait."""
        return answered.wait(5)

    slow, fast = rollout_batch(
        scripted(watched), chat, [user("slow"), user("fast")], [[wait, add]] * 2
    )
    assert (slow.tool_results[0].content, slow.num_turns, fast.num_turns) == ("true", 2, 4)


def test_status_follows_the_rollout(chat, scripted):
    status, seen = RolloutStatus(), []

    def look() -> str:
        """Look."""
        seen.append((status.num_trajectories, status.num_finished, status.num_in_tools))
        return "seen"

    t = rollout_single(scripted([call("look"), "ok"]), chat, user(), [look], status=status)
    assert seen == [(1, 0, 1)]
    assert (status.num_finished, status.num_in_tools, status.num_generating) == (1, 0, 0)
    assert status.num_sampled_tokens == t.num_sampled_tokens


# ---- where it runs ----


def test_inside_a_running_event_loop(chat, scripted):
    async def notebook():
        blocking = rollout_single(scripted([ADD, "3"]), chat, user(), [add])
        awaited = await rollout_single_async(scripted([ADD, "3"]), chat, user(), [add])
        return blocking, awaited

    blocking, awaited = asyncio.run(notebook())
    assert blocking.completion_ids == awaited.completion_ids


def test_an_error_inside_a_running_event_loop_is_raised(chat, scripted):
    async def notebook():
        rollout_batch(scripted(["ok"]), chat, [user()], num_generations=0)

    with pytest.raises(ValueError, match="num_generations"):
        asyncio.run(notebook())


def test_from_a_thread(chat, scripted):
    results = []
    thread = threading.Thread(
        target=lambda: results.append(rollout_single(scripted([ADD, "3"]), chat, user(), [add]))
    )
    thread.start()
    thread.join(10)
    assert [t.turn_outputs for t in results] == [[ADD, "3"]]


def test_cancelling_ends_the_wait(chat, scripted):
    began = threading.Event()

    async def wait() -> str:
        """Wait."""
        began.set()
        await asyncio.Event().wait()

    async def work():
        engine = scripted([call("wait")])
        task = asyncio.create_task(rollout_batch_async(engine, chat, [user()], [[wait]]))
        while not began.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return True

    assert asyncio.run(work())
