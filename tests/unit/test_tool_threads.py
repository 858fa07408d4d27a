"""Where a sync tool runs: on shared threads, on one thread for good, or on the main thread."""

import asyncio
import signal
import sqlite3
import threading
import time

import pytest
from fakes import by_prompt, call, user
from tool_calls import ask, failed, schema, tool

from agent_vllm.errors import ToolDefinitionError
from agent_vllm.rollout import rollout_batch, rollout_batch_async
from agent_vllm.settings import Limits
from agent_vllm.tools import Tool, ToolRunner, isolated, tools_by_name


def alarmed() -> str:
    """Work under a time limit, as TRL's example of an agent does."""

    def late(number, frame):
        raise TimeoutError("too slow")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(5)
    except TimeoutError as error:
        return str(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return "in time"


@pytest.fixture
def play(chat, scripted):
    """Contents of the results of two trajectories that call one tool once each."""

    def play(tool, **options):
        turns = [call(tool.name), "a"]
        engine = scripted(by_prompt(chat, one=turns, two=list(turns)))
        prompts = [user("one"), user("two")]
        trajectories = rollout_batch(engine, chat, prompts, [[tool]] * 2, **options)
        return [r.content for t in trajectories for r in t.tool_results]

    return play


@pytest.mark.parametrize("where", ["a script", "a notebook"])
def test_a_tool_in_the_main_thread_may_use_signals(play, where):
    tool = Tool(function=alarmed, runs_in="main")

    async def cell():
        return play(tool)

    results = play(tool) if where == "a script" else asyncio.run(cell())
    assert results == ["too slow"] * 2


def test_a_tool_in_the_main_thread_of_an_async_program(chat, scripted):
    tool = Tool(function=alarmed, runs_in="main")
    engine = scripted([call("alarmed"), "a"])
    (t,) = asyncio.run(rollout_batch_async(engine, chat, [user()], [[tool]]))
    assert [r.content for r in t.tool_results] == ["too slow"]


def test_the_main_thread_may_use_what_the_script_opened(play):
    database = sqlite3.connect(":memory:")

    def query() -> int:
        """Query the database."""
        return database.execute("select 7").fetchone()[0]

    for _ in range(2):
        assert play(Tool(function=query, runs_in="main")) == ["7"] * 2
    database.close()


def test_one_thread_keeps_what_tools_open_over_rollouts(play):
    opened = []

    def query() -> int:
        """Query a database that the first call opens."""
        if not opened:
            opened.append(sqlite3.connect(":memory:"))
        return opened[0].execute("select 7").fetchone()[0]

    def close() -> str:
        """Close it."""
        opened[0].close()
        return "closed"

    for _ in range(3):
        assert play(Tool(function=query, runs_in="one_thread")) == ["7"] * 2
    assert play(Tool(function=close, runs_in="one_thread")) == ["closed"] * 2
    assert len(opened) == 1


def test_a_tool_in_the_main_thread_may_run_a_loop_or_a_rollout_of_its_own(chat, scripted, play):
    async def seven():
        return "7"

    def nested() -> str:
        """Ask another agent."""
        tool = Tool(function=alarmed, runs_in="main")
        (t,) = rollout_batch(scripted([call("alarmed"), "b"]), chat, [user()], [[tool]])
        return asyncio.run(seven()) + t.tool_results[0].content

    assert play(Tool(function=nested, runs_in="main")) == ["7too slow"] * 2


def touch_signals():
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def touch_a_database():
    _database.execute("select 7")


_database = sqlite3.connect(":memory:")


@pytest.mark.parametrize("function", [touch_signals, touch_a_database])
def test_an_error_about_threads_names_the_setting(function):
    async def content():
        (result,) = await ToolRunner().run([ask()], {"f": tool(function)})
        return result.content

    assert "Give `Tool(function=f, runs_in='main')` for signals" in asyncio.run(content())


@pytest.mark.parametrize("runs_in", ["main", "one_thread"])
def test_a_call_that_hangs_there_is_answered_in_time(play, runs_in, caplog):
    """In the main thread nothing can end it; elsewhere another thread takes over, and says so."""
    threads = []

    def hang() -> str:
        """Hang."""
        threads.append(threading.current_thread())
        time.sleep(0.5)
        return "late"

    hang_there = Tool(function=hang, runs_in=runs_in)
    results = play(hang_there, limits=Limits(tool_timeout_s=0.1))
    assert results == [failed("Timed out after 0.1 s.")[1]] * 2
    assert ("A call of `hang` was given up" in caplog.text) == (runs_in == "one_thread")
    assert threads[0] is threading.main_thread() or runs_in == "one_thread"


def test_other_trajectories_go_on_while_a_tool_holds_the_main_thread(chat, scripted):
    others = threading.Event()

    def wait() -> bool:
        """Wait for the other trajectory."""
        return others.wait(20)

    def free() -> str:
        """Let it go on."""
        others.set()
        return "done"

    tools = [Tool(function=wait, runs_in="main"), free]
    turns = [call("wait") + "\n" + call("free"), "a"]
    (t,) = rollout_batch(scripted(turns), chat, [user()], [tools])
    assert [r.content for r in t.tool_results] == ["true", "done"]


async def wait_async() -> str:
    """Wait."""
    return ""


@pytest.mark.parametrize(
    ("function", "runs_in", "message"),
    [
        (alarmed, "process", r"`runs_in` of tool `alarmed` must be one of .*`isolated\(tool\)`"),
        (wait_async, "main", "`runs_in` of tool `wait_async` must be left out, got 'main'"),
    ],
)
def test_a_place_that_there_is_not_is_refused(function, runs_in, message):
    with pytest.raises(ToolDefinitionError, match=message):
        Tool(function=function, runs_in=runs_in)


def test_a_tool_by_its_function_alone_is_described_as_in_a_list():
    assert Tool(function=alarmed).schema == tools_by_name([alarmed])["alarmed"].schema


def test_an_isolated_tool_has_a_place_of_its_own():
    with pytest.raises(ToolDefinitionError, match="isolated tools"):
        isolated(Tool(schema=schema("alarmed"), function=alarmed, runs_in="main"))
