"""Tools: schemas, checks, running side by side, time limits, the text of results."""

import asyncio
import datetime
import functools
import json
import threading
import time

import pytest
from fakes import add, shout
from tool_calls import ask, failed, run, run_one, tool

from agent_vllm.errors import ToolDefinitionError
from agent_vllm.tools import (
    ToolInterrupted,
    ToolRunner,
    as_tool,
    encode_result,
    row_function,
    tools_by_name,
    workers,
)
from agent_vllm.types import ToolCall, ToolResult

# ---- definitions ----


def test_schema_of_a_function():
    assert as_tool(add).schema["function"] == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "first"},
                "b": {"type": "integer", "description": "second"},
            },
            "required": ["a", "b"],
        },
        "return": {"type": "integer"},
    }


def test_missing_type_hints():
    def f(a):
        """
        Do.

        Args:
            a: what
        """

    with pytest.raises(
        ToolDefinitionError, match=r"Tool `f` can't be .*Give every argument a type"
    ):
        as_tool(f)


def test_missing_docstring():
    def f(a: int) -> int:
        return a

    with pytest.raises(ToolDefinitionError, match="Tool `f` can't be described"):
        as_tool(f)


def test_not_a_function():
    with pytest.raises(ToolDefinitionError, match=r"must be a function or an .*got 3"):
        as_tool(3)


def test_types_in_a_docstring_are_left_to_the_hints():
    def f(a: int, b: str | None = None) -> int:
        """
        Do.

        Args:
            a (int): first (of two): a number
            b (Optional[tuple(int)], optional): second
                note (see above): more

        Returns:
            int: the result
        """

    described = as_tool(f).schema["function"]["parameters"]["properties"]
    assert {name: schema["description"] for name, schema in described.items()} == {
        "a": "first (of two): a number",
        "b": "second note (see above): more",
    }


def test_a_tool_in_place_of_a_list_of_tools():
    for lone in (add, as_tool(add)):
        with pytest.raises(
            ToolDefinitionError, match=r"got the tool `add` itself. Write `\[add\]`"
        ):
            tools_by_name(lone)


def test_a_tool_in_place_of_a_function_from_rows_to_tools():
    def bare(a, b):
        return a + b

    def search(query: str) -> str:
        """
        Search.

        Args:
            query: what for
        """

    def described(row: dict) -> list:
        """
        Choose the tools of a row.

        Args:
            row: the dataset's
        """

    for lone in (add, bare, search, lambda: [add]):
        with pytest.raises(ToolDefinitionError, match="`tools` must be a list of tools"):
            row_function(lone)
    for chooser in (lambda row: [add], described, lambda row, more=None: []):
        assert row_function(chooser) is chooser


def test_two_tools_of_one_name():
    with pytest.raises(ToolDefinitionError, match="Two tools are named `add`"):
        tools_by_name([add, shout, add])


def test_order_is_kept():
    assert list(tools_by_name([shout, add])) == ["shout", "add"]
    assert tools_by_name(None) == {}


# ---- kinds of functions ----


async def add_async(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: first
        b: second
    """
    await asyncio.sleep(0)
    return a + b


class AsyncAdder:
    async def __call__(self, a, b):
        return a + b


@pytest.mark.parametrize(
    "function",
    [
        add,
        add_async,
        functools.partial(add),
        functools.partial(add_async),
        lambda a, b: a + b,
        AsyncAdder(),
    ],
)
def test_sync_async_and_partial(function):
    adder = tool(function, "add", a={"type": "integer"}, b={"type": "integer"})
    assert run([ask("add", a=1, b=2)], [adder]) == [("ok", "3")]


def test_results_keep_call_order_and_calls_run_side_by_side():
    """The first call ends only once the second has begun."""
    second_began = threading.Event()

    def first():
        assert second_began.wait(5)
        return "first"

    def second():
        second_began.set()
        return "second"

    tools = [tool(first, "first"), tool(second, "second")]
    calls = [ask("first"), ask("second")]
    assert run(calls, tools) == [("ok", "first"), ("ok", "second")]


def test_async_calls_run_side_by_side_on_one_loop():
    began, loops = [], set()

    async def meet():
        began.append(1)
        loops.add(id(asyncio.get_running_loop()))
        while len(began) < 3:
            await asyncio.sleep(0)
        return "met"

    assert run([ask()] * 3, [tool(meet)]) == [("ok", "met")] * 3
    assert len(loops) == 1


def test_no_more_calls_at_one_time_than_allowed():
    running, most, lock = 0, 0, threading.Lock()

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    run([ask()] * 6, [tool(work)], max_concurrency=2)
    assert most == 2


def test_a_name_and_a_status_for_every_result():
    results = asyncio.run(ToolRunner().run([ask("add", a=1, b=2)], tools_by_name([add])))
    assert results == [ToolResult(name="add", content="3", status="ok")]


# ---- calls that never run ----


def test_an_unknown_tool_is_answered_with_the_tools_there_are():
    assert run([ask("nope")], [add, shout]) == [
        ("invalid", '{"error": "Unknown tool \'nope\'. Available tools: add, shout."}')
    ]
    assert run([ask("nope")], []) == [
        ("invalid", '{"error": "Unknown tool \'nope\'. Available tools: none."}')
    ]


def test_a_call_that_could_not_be_read_is_not_run():
    runs = []
    counted = tool(lambda: runs.append(1))
    call = ToolCall(name="f", arguments=None, error='"arguments" is not a JSON object.')
    assert run([call], [counted]) == [
        ("invalid", r'{"error": "\"arguments\" is not a JSON object."}')
    ]
    assert runs == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"a": 1}, "arguments: 'b' is a required property"),
        ({"a": 1, "b": "2"}, "b: '2' is not of type 'integer'"),
        ({"a": 1, "b": True}, "b: True is not of type 'integer'"),
        (
            {"a": 1, "b": 2, "c": 3},
            "arguments: Additional properties are not allowed ('c' was unexpected)",
        ),
    ],
)
def test_arguments_that_do_not_fit(arguments, problem):
    (result,) = run([ask("add", **arguments)], [add])
    assert result == ("invalid", json.dumps({"error": f"Wrong arguments for 'add': {problem}"}))


def test_no_arguments_are_fine_only_where_none_are_taken():
    call = ToolCall(name="f", arguments=None)
    with_default = tool(lambda a=1: a, a={"type": "integer"})
    assert run([call], [tool(lambda: "ran")]) == [("ok", "ran")]
    assert run([call], [with_default]) == [
        ("invalid", '{"error": "The call of \'f\' has no arguments."}')
    ]
    assert run([ask()], [with_default]) == [("ok", "1")]


# ---- tools that raise ----


def raise_it(error):
    raise error


async def raise_it_async(error):
    raise error


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("raiser", [raise_it, raise_it_async])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError(), "ValueError"),
        (ValueError("no"), "ValueError: no"),
        (SystemExit(1), "SystemExit: 1"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError(), "CancelledError"),
        (TimeoutError("own"), "TimeoutError: own"),
    ],
)
def test_what_a_tool_raises_is_its_result(raiser, error, message):
    assert run_one(functools.partial(raiser, error)) == failed(message)


def test_stop_iteration_is_a_failed_result():
    assert run_one(functools.partial(raise_it, StopIteration())) == failed("StopIteration")
    status, content = run_one(functools.partial(raise_it_async, StopIteration()))
    assert status == "failed" and "StopIteration" in content


@pytest.mark.parametrize("raiser", [raise_it, raise_it_async])
def test_siblings_keep_their_results(raiser):
    exits = tool(functools.partial(raiser, SystemExit(1)), "exits")
    calls = [ask("add", a=1, b=2), ask("exits"), ask("add", a=3, b=4)]
    adder = tool(add_async, "add", a={}, b={})
    assert run(calls, [adder, exits]) == [("ok", "3"), failed("SystemExit: 1"), ("ok", "7")]


@pytest.mark.parametrize("raiser", [raise_it, raise_it_async])
def test_keyboard_interrupt_is_raised(raiser):
    with pytest.raises(ToolInterrupted):
        run_one(functools.partial(raiser, KeyboardInterrupt()))


def test_async_tool_that_does_not_take_what_its_schema_says():
    async def nothing():
        return 1

    status, content = run([ask(a=1)], [tool(nothing, a={})])[0]
    assert status == "failed" and "unexpected keyword argument 'a'" in content


def test_async_tool_that_cancels_itself():
    async def cancel():
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    assert run_one(cancel) == failed("CancelledError")


# ---- time limits ----


def spin():
    while True:
        pass


async def spin_async():
    while True:
        pass


async def never():
    await asyncio.Event().wait()


def test_a_hanging_tool_times_out():
    release = threading.Event()
    try:
        assert run_one(release.wait, timeout_s=0.05) == failed("Timed out after 0.05 s.")
    finally:
        release.set()


@pytest.mark.parametrize("function", [spin, never])
def test_endless_tools_time_out_and_others_do_not(function):
    tools = [tool(function), add]
    calls = [ask("add", a=1, b=2), ask(), ask("add", a=3, b=4)]
    assert run(calls, tools, timeout_s=0.3) == [
        ("ok", "3"),
        failed("Timed out after 0.3 s."),
        ("ok", "7"),
    ]


def test_a_python_loop_ends_with_its_call():
    threads = []

    def spin_here():
        threads.append(threading.current_thread())
        spin()

    assert run_one(spin_here, timeout_s=0.05) == failed("Timed out after 0.05 s.")
    threads[0].join(5)
    assert not threads[0].is_alive()


@pytest.mark.parametrize("hold", [spin_async, None], ids=["python loop", "time.sleep"])
def test_an_async_tool_that_holds_its_loop_times_out_alone(hold):
    """Its own call times out; the rollout's loop goes on, and later async calls are served."""
    release = threading.Event()

    async def block():
        release.wait()  # C code, as time.sleep is

    holding = tool(hold or block, "hold")
    later = tool(add_async, "add", a={}, b={})

    async def work():
        runner, ticks = ToolRunner(timeout_s=0.1), []

        async def tick():
            while True:
                ticks.append(1)
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        tools = tools_by_name([holding, later])
        first = await runner.run([ask("hold")], tools)
        num_ticks = len(ticks)
        second = await runner.run([ask("add", a=1, b=2)], tools)
        ticking.cancel()
        return first + second, num_ticks

    try:
        results, num_ticks = asyncio.run(work())
    finally:
        release.set()
    assert [(r.status, r.content) for r in results] == [
        failed("Timed out after 0.1 s."),
        ("ok", "3"),
    ]
    assert num_ticks >= 3


def test_threads_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(workers, "MAX_HANGING_CALLS", 2)
    monkeypatch.setattr(workers, "_hanging", set())
    release = threading.Event()
    wait = tool(release.wait)

    async def one_after_another():
        runner = ToolRunner(timeout_s=0.02)
        named = tools_by_name([wait])
        results = [(await runner.run([ask()], named))[0] for _ in range(4)]
        release.set()
        for thread in list(workers._hanging):
            thread.join(5)
        return [*results, *await runner.run([ask()], named)]

    contents = [json.loads(r.content) for r in asyncio.run(one_after_another())]
    refused = {"error": "Not run: 2 earlier calls that timed out still hang."}
    late = {"error": "Timed out after 0.02 s."}
    assert contents == [late, late, refused, refused, True]


def test_calls_share_threads_but_never_one_that_was_given_up():
    seen, release = [], threading.Event()

    def note():
        seen.append(threading.current_thread())

    def hang():
        note()
        release.wait()

    async def work():
        runner = ToolRunner(timeout_s=None)
        named = tools_by_name([tool(note, "note"), tool(hang, "hang")])
        for name, timeout_s in [("note", None), ("note", None), ("hang", 1.0)]:
            await runner.run([ask(name)], named, timeout_s)
            while name == "note" and seen[-1] not in [worker.thread for worker in workers._idle]:
                await asyncio.sleep(0.01)
        release.set()
        await runner.run([ask("note")], named)

    asyncio.run(work())
    seen[2].join(5)
    assert seen[0] is seen[1] is seen[2]
    assert not seen[2].is_alive()
    assert seen[3] is not seen[2]


def test_the_tighter_limit_wins():
    async def work(timeout_s):
        runner = ToolRunner(timeout_s=0.05)
        return await runner.run([ask()], tools_by_name([tool(never)]), timeout_s)

    for given, content in ((0.01, "after 0.01 s"), (60.0, "after 0.05 s"), (None, "after 0.05 s")):
        assert content in asyncio.run(work(given))[0].content


def test_no_time_limit():
    assert run([ask("add", a=1, b=2)], [add], timeout_s=None) == [("ok", "3")]


# ---- results as text ----


def test_a_result_with_an_error_key_is_not_a_failure():
    assert run_one(lambda: {"error": None, "rows": 3}) == ("ok", '{"error": null, "rows": 3}')


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain é", "plain é"),
        (None, "null"),
        (True, "true"),
        ({"a": None}, '{"a": null}'),
        ([1, 2, 3], "[1, 2, 3]"),
        ((1, "汉"), '[1, "汉"]'),
        ({1}, "[1]"),
        (datetime.date(2020, 1, 2), '"2020-01-02"'),
        (float("nan"), "NaN"),
        (b"x\xff", '"x�"'),
        ("\ud83d", "?"),
        ({"a": ["\ud83d"]}, '{"a": ["?"]}'),
    ],
)
def test_each_value_is_written_as_text(value, text):
    assert encode_result(value) == text


def test_values_that_have_no_text_fail_the_call():
    circular = {}
    circular["self"] = circular
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (circular, deep, {Unprintable(): 3}, {"a": Unprintable()}):
        status, content = run_one(lambda value=value: value)
        assert status == "failed"
        assert json.loads(content)["error"].startswith("The result can't be written as JSON: ")


@pytest.mark.parametrize("function", [add, add_async])
def test_a_call_that_gets_no_thread_is_a_failed_result(monkeypatch, function):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(workers, "_idle", [])
    monkeypatch.setattr(workers, "_shared_loop", None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert run([ask(function.__name__, a=1, b=2)], [function]) == [
        failed("Not run: no thread could be started (can't start new thread).")
    ]


def test_a_call_that_gets_no_event_loop_is_a_failed_result(monkeypatch):
    def refuse():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(workers, "_shared_loop", None)  # as in a program's first async call
    monkeypatch.setattr(asyncio, "new_event_loop", refuse)  # `asyncio.run` has another name for it
    ((status, content),) = run([ask("add_async", a=1, b=2)], [add_async])
    assert status == "failed" and "no event loop could be made" in content
