"""Tools that misbehave on threads and loops: the call ends in one result, and nobody else notices.

What a thread can't be kept from (closing the process's files, ending it) is in docs/security.md;
`tests/unit/test_isolation.py` shows it kept out.
"""

import asyncio
import collections
import dataclasses
import datetime
import decimal
import enum
import json
import os
import re
import threading
import time
import types

import numpy as np
import pandas
import pydantic
import pytest
import torch
from fakes import add
from tool_calls import ask, failed, run, run_one, tool

from agent_vllm.tools import MAX_RESULT_CHARS, ToolRunner, encode_result, tools_by_name

# ---- what it raises ----


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def all_kinds(kind=BaseException):
    """Every built-in exception but the one that means "stop the run"."""
    kinds = [kind, *(k for child in kind.__subclasses__() for k in all_kinds(child))]
    builtin = [k for k in kinds if k.__module__ == "builtins"]
    return [k for k in builtin if not issubclass(k, KeyboardInterrupt)]


def an_error(kind):
    if issubclass(kind, UnicodeDecodeError):
        return kind("utf-8", b"x", 0, 1, "bad")
    if issubclass(kind, UnicodeEncodeError):
        return kind("utf-8", "x", 0, 1, "bad")
    if issubclass(kind, UnicodeTranslateError):
        return kind("x", 0, 1, "bad")
    if issubclass(kind, BaseExceptionGroup):
        return kind("several", [ValueError("one")])
    return kind("why")


def test_every_built_in_exception_is_a_result():
    errors = [an_error(kind) for kind in all_kinds()]

    def raise_in_turn(index):
        raise errors[index]

    async def raise_in_turn_async(index):
        raise errors[index]

    calls = [ask(index=index) for index in range(len(errors))]
    for function in (raise_in_turn, raise_in_turn_async):
        results = run(calls, [tool(function, index={})])
        assert {status for status, _ in results} == {"failed"}
        for error, (_, content) in zip(errors, results, strict=True):
            assert type(error).__name__ in content
    assert len(errors) > 60


def test_an_exception_without_text_is_named():
    def work():
        raise Unprintable

    assert run_one(work) == failed("Unprintable")


def test_endless_recursion():
    def deeper():
        return deeper()

    status, content = run_one(deeper)
    assert status == "failed" and "RecursionError: maximum recursion depth" in content


def test_no_traceback_and_no_path_of_ours_in_an_error():
    def outer():
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("outer") from error

    def inner():
        raise ValueError("inner")

    assert run_one(outer) == failed("RuntimeError: outer")


# ---- what it returns ----


class Opaque:
    pass


class Slow:
    def __str__(self):
        time.sleep(60)
        return ""


def a_generator():
    yield 1


async def an_async_generator():
    yield 1


@pytest.mark.parametrize("value", [Opaque(), [Opaque()], a_generator(), add, threading.Lock()])
def test_a_value_without_text_of_its_own_is_refused(value):
    status, content = run_one(lambda: value)
    assert status == "failed"
    assert re.search(r"an object of type \w+ has no text of its own", content)


def test_an_async_generator_function_is_refused():
    status, content = run_one(an_async_generator)
    assert status == "failed" and "type async_generator has no text" in content


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b", "a", "c"}, '["a", "b", "c"]'),
        ({10, 9, 2.5}, "[2.5, 9, 10]"),
        ({None, "b", 1, "a", 2, (3,)}, '[null, 1, 2, "a", "b", [3]]'),
        ({frozenset({2, 1}), frozenset({3}), frozenset()}, "[[1, 2], [3], []]"),
        ({"k": {True, False}}, '{"k": [false, true]}'),
        (memoryview(b"abc"), '"abc"'),
        (float("inf"), "Infinity"),
        ("a\x00\x1b[31m\r\u2028", "a\x00\x1b[31m\r\u2028"),
        (["\x00\x1b"], '["\\u0000\\u001b"]'),
    ],
)
def test_text_that_is_the_same_in_every_run(value, text):
    assert encode_result(value) == text


class Colour(enum.Enum):
    RED = "red"


class Point(pydantic.BaseModel):
    x: int
    day: datetime.date


@dataclasses.dataclass
class Boxed:
    inside: object


Pair = collections.namedtuple("Pair", "a b")
DAY = datetime.date(2026, 1, 2)
FRAME = pandas.DataFrame({"a": [1, 2], "b": [0.5, None]})


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.int64(7), 7),
        ({"mean": np.float32(0.5), "is": np.bool_(False)}, {"mean": 0.5, "is": False}),
        (np.arange(2000), list(range(2000))),
        (np.array([["a"]]), [["a"]]),
        (torch.ones(1, 2, dtype=torch.bfloat16), [[1.0, 1.0]]),
        (torch.tensor(3), 3),
        (
            pandas.DataFrame({"a": [1, 2], "b": [0.5, None]}),
            [{"a": 1, "b": 0.5}, {"a": 2, "b": None}],
        ),
        (
            pandas.DataFrame({"a": [1]}, index=["r"]),
            {"columns": ["a"], "index": ["r"], "data": [[1]]},
        ),
        (pandas.Series(range(100)), list(range(100))),
        (pandas.Series([1], index=["k"]), {"k": 1}),
        ([Point(x=1, day=DAY)], [{"x": 1, "day": "2026-01-02"}]),
        (Boxed(np.arange(2)), {"inside": [0, 1]}),
        (Boxed, str(Boxed)),
        (Colour.RED, "red"),
        ({Colour.RED: {"x"}}, {"red": ["x"]}),
        (decimal.Decimal("19.99"), 19.99),
        (decimal.Decimal("1E+2"), 100),
        (decimal.Decimal("0.12345678901234567890"), "0.12345678901234567890"),
        (decimal.Decimal("1E+999999"), "1E+999999"),
        (collections.deque([1, 2]), [1, 2]),
        (range(3), [0, 1, 2]),
        ({"a": 1}.keys(), ["a"]),
        ({"a": 1}.values(), [1]),
        (types.MappingProxyType({"a": 1}), {"a": 1}),
        (collections.UserList([1]), [1]),
        (Pair(1, 2), [1, 2]),
        (
            {(1, 2): 3, DAY: Boxed(1), 4: None},
            {"[1, 2]": 3, "2026-01-02": {"inside": 1}, "4": None},
        ),
    ],
)
def test_what_people_return_is_json(value, found):
    assert json.loads(encode_result(value)) == found


def test_a_long_array_is_cut_with_a_mark():
    text = encode_result(np.arange(100_000))
    assert text.startswith("[0, 1, 2") and text.endswith("characters cut]")


@pytest.mark.parametrize("make", [lambda: "x" * 10**8, lambda: {"a": ["y" * 10**7] * 10}])
def test_a_result_of_100_mb_is_cut_and_marked(make):
    ((status, content),) = run([ask()], [tool(make)], timeout_s=60)
    text, mark = content[:MAX_RESULT_CHARS], content[MAX_RESULT_CHARS:]
    assert (status, len(text)) == ("ok", MAX_RESULT_CHARS)
    assert re.fullmatch(r"\n\[\.\.\. \d+ characters cut\]", mark)


def test_a_result_at_the_bound_is_whole():
    assert encode_result("x" * MAX_RESULT_CHARS) == "x" * MAX_RESULT_CHARS
    cut = encode_result("x" * (MAX_RESULT_CHARS + 1))
    assert cut == "x" * MAX_RESULT_CHARS + "\n[... 1 characters cut]"


def test_an_error_of_100_mb_is_cut():
    def work():
        raise ValueError("x" * 10**8)

    status, content = run_one(work)
    assert status == "failed" and len(content) < MAX_RESULT_CHARS + 200


def test_a_value_whose_text_takes_for_ever_holds_nobody_up():
    tools = [tool(lambda: [Slow()]), add]
    calls = [ask(), ask("add", a=1, b=2)]
    assert run(calls, tools, timeout_s=0.1) == [failed("Timed out after 0.1 s."), ("ok", "3")]


def test_a_sync_function_that_returns_a_coroutine_is_awaited():
    async def work(a):
        await asyncio.sleep(0)
        return a + 1

    def fails():
        async def inner():
            raise ValueError("no")

        return inner()

    async def hangs():
        await asyncio.Event().wait()

    assert run([ask(a=1)], [tool(lambda a: work(a), a={})]) == [("ok", "2")]
    assert run_one(fails) == failed("ValueError: no")
    assert run_one(lambda: hangs(), timeout_s=0.05) == failed("Timed out after 0.05 s.")


def test_the_conversation_keeps_its_own_arguments():
    def spoil(items):
        items.append("spoiled")
        return len(items)

    call = ask(items=[1])
    assert run([call], [tool(spoil, items={})]) == [("ok", "2")]
    assert call.arguments == {"items": [1]}


# ---- how it ends, or doesn't ----


def test_two_tools_that_deadlock_each_other():
    one, two, meet = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def take(first, second):
        with first:
            meet.wait()
            second.acquire()
            second.release()

    tools = [tool(lambda: take(one, two), "ab"), tool(lambda: take(two, one), "ba"), add]
    calls = [ask("ab"), ask("ba"), ask("add", a=1, b=2)]
    try:
        late = failed("Timed out after 0.1 s.")
        assert run(calls, tools, timeout_s=0.1) == [late, late, ("ok", "3")]
    finally:
        one.release()
        two.release()


def test_a_tool_that_catches_everything_is_interrupted_all_the_same():
    threads = []

    def stubborn():
        threads.append(threading.current_thread())
        while True:
            try:
                time.sleep(0.001)
            except Exception:
                continue

    assert run_one(stubborn, timeout_s=0.05) == failed("Timed out after 0.05 s.")
    threads[0].join(5)
    assert not threads[0].is_alive()


@pytest.mark.filterwarnings("ignore")  # newer Pythons warn of a fork with threads
def test_a_tool_that_forks_answers_once():
    children = []

    def fork():
        child = os.fork()
        if child:
            children.append(child)
        return "forked"

    assert run([ask(), ask("add", a=1, b=2)], [tool(fork), add]) == [("ok", "forked"), ("ok", "3")]
    assert len(children) == 1
    os.waitpid(children[0], 0)


def test_a_background_task_that_exits_leaves_the_loop_to_others():
    async def leave():
        raise SystemExit(1)

    async def spawn():
        task = asyncio.ensure_future(leave())
        await asyncio.wait([task])
        task.exception()  # else the loop complains that nobody looked
        return "spawned"

    async def after():
        return "served"

    async def work():
        runner = ToolRunner(timeout_s=5)
        tools = tools_by_name([tool(spawn, "spawn"), tool(after, "after")])
        results = [(await runner.run([ask(name)], tools))[0] for name in ("spawn", "after")]
        return [result.content for result in results]

    assert asyncio.run(work()) == ["spawned", "served"]


@pytest.mark.parametrize("num_calls", [1, 5])
def test_a_stuck_loop_lets_its_other_calls_end_and_then_its_thread(num_calls):
    """Also where several time out on it together."""
    release, threads = threading.Event(), []

    async def hold():
        threads.append(threading.current_thread())
        release.wait()  # C code

    async def later():
        await asyncio.sleep(0)
        return "later"

    async def work():
        runner = ToolRunner(timeout_s=0.1)
        tools = tools_by_name([tool(hold, "hold"), tool(later, "later")])
        first, *_ = await runner.run([ask("hold")] * num_calls, tools)
        (second,) = await runner.run([ask("later")], tools)
        return [json.loads(first.content)["error"], second.content]

    try:
        assert asyncio.run(work()) == ["Timed out after 0.1 s.", "later"]
    finally:
        release.set()
    threads[0].join(5)
    assert not threads[0].is_alive()


def test_a_cancelled_rollout_cancels_its_async_calls():
    started, cancelled = threading.Event(), threading.Event()

    async def wait_for_ever():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def work():
        runner = ToolRunner(timeout_s=None)
        running = asyncio.create_task(runner.run([ask()], tools_by_name([tool(wait_for_ever)])))
        while not started.is_set():
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(work())
    assert cancelled.wait(5)


def test_a_cancelled_rollout_interrupts_its_threads():
    threads = []

    def spin():
        threads.append(threading.current_thread())
        while True:
            pass

    async def work():
        runner = ToolRunner(timeout_s=None)
        running = asyncio.create_task(runner.run([ask()], tools_by_name([tool(spin)])))
        while not threads:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(work())
    threads[0].join(5)
    assert not threads[0].is_alive()
