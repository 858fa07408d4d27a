"""Each kind of fault alone on the real vLLM: its call has a result, and nobody else notices.

Nothing is scripted. The tiny agent asks for its calculator; in the faulty row the calculator is a
tool of `hostile.py`. The neighbours' tokens are those of a run without the fault.
"""

import asyncio
import gc
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import hostile
import pytest
from fakes import difference
from tiny_tasks import SMALL_KINDS, calculator, get_price, get_weather, make_tasks
from tool_calls import failed
from transformers import AutoModelForCausalLM

from agent_vllm import ChatFormat, Limits, rollout_batch
from agent_vllm.tools import MAX_RESULT_CHARS, as_tool, isolated, shared_loop

pytestmark = pytest.mark.vllm

GOOD = [calculator, get_weather, get_price]
HANG_S = 1.0
LATE = failed("Timed out after 1 s.")

HANGING = {  # with each, what its call comes to
    "waits for ever": (hostile.wait_for_ever, LATE),
    "spins": (hostile.spin, LATE),
    "async, never yields": (hostile.hold_the_loop, LATE),
    "async, waits for ever": (hostile.wait_for_ever_async, LATE),
}
RAISING = {
    f"raises {error!r}": (hostile.raising(error), failed(message))
    for error, message in (
        (Exception(), "Exception"),
        (ValueError("<|im_end|>"), "ValueError: <|im_end|>"),
        (StopIteration(1), "StopIteration: 1"),
        (MemoryError("none left"), "MemoryError: none left"),
        (BaseException("why"), "BaseException: why"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError("no"), "CancelledError: no"),
        (BaseExceptionGroup("two", [SystemExit(1)]), "BaseExceptionGroup: two (1 sub-exception)"),
    )
}
OTHERS = {
    "recursion": (
        hostile.recurse,
        failed("RecursionError: maximum recursion depth exceeded"),
    ),
    "sys.exit": (hostile.leave, failed("SystemExit: bye")),
    "100 MB": (
        hostile.flood,
        ("ok", "9" * MAX_RESULT_CHARS + "\n[... 99800000 characters cut]"),
    ),
    "bytes": (hostile.returning(b"\xff\x00"), ("ok", '"\ufffd\\u0000"')),
    "NaN": (hostile.returning(hostile.NAN), ("ok", "NaN")),
    "a set": (hostile.returning({3, 1, 2}), ("ok", "[1, 2, 3]")),
    "a surrogate": (hostile.returning(hostile.SURROGATE), ("ok", "?")),
    "control characters": (hostile.returning(hostile.CONTROL), ("ok", hostile.CONTROL)),
    "self-reference": (
        hostile.contains_itself,
        failed("The result can't be written as JSON: Circular reference detected"),
    ),
    "forks": (hostile.fork, ("ok", '["parent"]')),
}
ISOLATED = {
    "os._exit": (hostile.exit_at_once, failed("Ended without a result: exit status 7.")),
    "crashes": (hostile.crash, failed("Ended without a result: killed by SIGSEGV.")),
    "closes stdout": (hostile.close_stdout, ("ok", "closed")),
    "forks, its child stays": (hostile.fork_and_stay, ("ok", "forked")),
    "takes all memory": (hostile.fill_the_memory, failed("MemoryError")),
}


@pytest.fixture(scope="module")
def roll(vllm_engine, agent_path):
    """Rolls eight tasks out, with other calculators in the first rows."""
    vllm_engine.update_policy(AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32"))
    chat = ChatFormat.from_tokenizer(vllm_engine.tokenizer)
    tasks = make_tasks("train", 8, kinds=SMALL_KINDS)
    tasks.sort(key=lambda task: task["kind"] != "calc")

    def roll(*functions, tool_timeout_s=60.0):
        tools = [[as_hostile(function), *GOOD[1:]] for function in functions]
        return rollout_batch(
            vllm_engine,
            chat,
            [task["prompt"] for task in tasks],
            tools + [GOOD] * (len(tasks) - len(tools)),
            limits=Limits(
                max_turns=4,
                max_completion_tokens=200,
                max_tool_result_tokens=60,
                tool_timeout_s=tool_timeout_s,
            ),
            temperature=0.7,
            seed=roll.seed,
        )

    return roll


def as_hostile(function):
    return function if function is calculator else replace(as_tool(calculator), function=function)


@pytest.fixture(scope="module")
def undisturbed(roll):
    for roll.seed in range(20):
        trajectories = roll()
        first = [[r.name for r in t.tool_results][:1] for t in trajectories[:2]]
        num_calls = sum(len(t.tool_results) for t in trajectories)
        if first == [["calculator"]] * 2 and num_calls > 4:  # else there is nothing to disturb
            return trajectories
    raise AssertionError("the agent never calls its calculator")


def held():
    """Threads, open files and child processes of this process, beside one shared loop."""
    shared_loop()  # with the few idle threads of its pool
    lists = Path("/proc/self/task").glob("*/children")  # each thread has its own
    children = [child for path in lists for child in path.read_text().split()]
    threads = threading.enumerate()
    return (
        {t.ident for t in threads if t.name != "async tools" and not t.name.startswith("asyncio_")},
        sum(thread.name == "async tools" for thread in threads),
        len(os.listdir("/proc/self/fd")),
        len(children),
    )


def given_back(before):
    give_up = time.monotonic() + 20
    while True:
        gc.collect()  # warm workers live as long as their tool
        threads, *counts = held()
        new = (threads - before[0], *(a - b for a, b in zip(counts, before[1:], strict=True)))
        if not new[0] and max(new[1:]) <= 0:
            return True
        assert time.monotonic() < give_up, f"threads, loops, files, children left: {new}"
        time.sleep(0.02)


def check(undisturbed, trajectories, results):
    """The first rows have these results, the others the tokens that they had."""
    for t, result in zip(trajectories, results, strict=False):
        (first, *_) = t.tool_results
        assert (first.status, first.content) == result
        assert t.completion_mask.count(0) > 0 and t.num_turns > 1  # it was told, and went on
    for row in range(len(results), len(undisturbed)):
        got, expected = trajectories[row], undisturbed[row]
        assert difference(got.completion_ids, expected.completion_ids) is None, row
        assert got.stop_reason == expected.stop_reason


@pytest.mark.parametrize("kind", HANGING)
def test_a_tool_that_is_never_done(roll, undisturbed, kind):
    function, result = HANGING[kind]
    before = held()
    hostile.release.clear()
    try:
        trajectories = roll(function, tool_timeout_s=HANG_S)
    finally:
        hostile.release.set()
    check(undisturbed, trajectories, [result])
    assert given_back(before)


def test_two_tools_that_deadlock_each_other(roll, undisturbed):
    before = held()
    functions = (hostile.take_one_then_two, hostile.take_two_then_one)
    check(undisturbed, roll(*functions, tool_timeout_s=HANG_S), [LATE, LATE])
    hostile.one.release()
    assert given_back(before)


@pytest.mark.filterwarnings("ignore")  # newer Pythons warn of a fork with threads
@pytest.mark.parametrize("kind", RAISING | OTHERS)
def test_a_tool_that_raises_or_returns_what_it_should_not(roll, undisturbed, kind):
    function, result = (RAISING | OTHERS)[kind]
    before = held()
    check(undisturbed, roll(function), [result])
    if kind == "forks":
        os.waitpid(-1, 0)
    assert given_back(before)


@pytest.mark.parametrize("kind", ISOLATED)
def test_a_tool_that_would_end_the_process(roll, undisturbed, kind):
    function, result = ISOLATED[kind]
    before = held()
    wrapped = isolated(as_hostile(function), warm=True).function
    check(undisturbed, roll(wrapped), [result])
    del wrapped
    assert given_back(before)


def test_an_isolated_tool_that_sleeps_is_killed(roll, undisturbed):
    before = held()
    wrapped = isolated(as_hostile(hostile.sleep_for_ever)).function
    check(undisturbed, roll(wrapped, tool_timeout_s=HANG_S), [LATE])
    assert given_back(before)


def test_the_check_finds_a_neighbour_that_was_disturbed(roll, undisturbed):
    spoiled = roll(lambda expression: "7", lambda expression: "8")
    with pytest.raises(AssertionError):
        check(undisturbed, spoiled, [("ok", "7")])
    with pytest.raises(AssertionError):
        check(undisturbed, spoiled, [("ok", "8")])
