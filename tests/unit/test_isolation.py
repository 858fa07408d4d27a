"""Isolated tools: whatever a call does to its process, this one has one result."""

import dataclasses
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import untrusted
from paths import PYTHONPATH, ROOT
from tool_calls import ask, failed, run, tool

from agent_vllm.errors import ToolDefinitionError
from agent_vllm.tools import MAX_RESULT_CHARS, as_tool, isolated


def call(function, timeout_s=20.0, limits=None, **arguments):
    """(status, content) of one isolated call."""
    properties = {name: {} for name in arguments}
    wrapped = isolated(tool(function, **properties), **(limits or {}))
    return run([ask(**arguments)], [wrapped], timeout_s)[0]


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def becomes(holds):
    give_up = time.monotonic() + 10
    while not holds() and time.monotonic() < give_up:
        time.sleep(0.01)
    return holds()


def test_results_are_what_a_thread_would_give():
    for function in (untrusted.add, untrusted.add_async):
        assert call(function, a=1, b=2) == ("ok", "3")
    assert call(untrusted.several) == ("ok", '{"set": [1, 2, 3], "none": null}')
    assert call(untrusted.Box.open) == ("ok", "opened")
    assert run([ask("add", a="1", b=2)], [isolated(untrusted.add)])[0][0] == "invalid"


def test_what_is_not_the_function_stays_as_it_was():
    plain = as_tool(untrusted.add)
    assert isolated(plain).schema == plain.schema
    assert isolated(plain).max_concurrency == os.cpu_count()


ENDINGS = [
    (untrusted.exit_at_once, failed("Ended without a result: exit status 7.")),
    (untrusted.leave, failed("SystemExit: bye")),
    (untrusted.interrupt, failed("KeyboardInterrupt")),
    (untrusted.crash, failed("Ended without a result: killed by SIGSEGV.")),
    (untrusted.stop_the_caller, failed("Ended without a result: killed by SIGKILL.")),
    (untrusted.allocate, failed("MemoryError")),
    (untrusted.close_stdout, ("ok", "closed")),
    (untrusted.close_everything, failed("Ended without a result: exit status 1.")),
    (untrusted.talk, ("ok", "talked")),
    (untrusted.read_stdin, ("ok", "")),
]


@pytest.mark.parametrize(("function", "result"), ENDINGS)
def test_what_a_call_does_to_its_process(function, result):
    assert call(function) == result


def test_a_sleeping_call_is_killed_when_its_time_is_up():
    assert call(untrusted.sleep, timeout_s=0.5) == failed("Timed out after 0.5 s.")


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (untrusted.spin, "1 s of processor time used up"),
        (untrusted.spin_through_the_signal, "killed by SIGKILL"),
    ],
)
def test_processor_time(function, cause):
    assert call(function, limits={"cpu_s": 1}) == failed(f"Ended without a result: {cause}.")


def test_output():
    limits = {"max_output_bytes": 10_000}
    assert call(untrusted.large, limits=limits, num_chars=9_000) == ("ok", "x" * 9_000)
    too_long = failed("The result is longer than 10000 bytes.")
    assert call(untrusted.large, limits=limits, num_chars=50_000) == too_long
    status, content = call(untrusted.large, num_chars=10**8)
    assert status == "ok" and content.startswith("x" * MAX_RESULT_CHARS + "\n[... ")


def test_files():
    limits = {"max_output_bytes": 10_000}
    assert call(untrusted.write_file, limits=limits, num_bytes=10_000) == ("ok", "null")
    status, content = call(untrusted.write_file, limits=limits, num_bytes=10_001)
    assert status == "failed" and "File too large" in content
    _, content = call(untrusted.folder)
    folder, listed = json.loads(content)
    assert listed == [] and not Path(folder).exists()


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (untrusted.fork_and_stay, ("ok", "forked")),
        (untrusted.fork_and_die, failed("Ended without a result: exit status 7.")),
        (untrusted.escape, failed("Ended without a result: exit status 7.")),
        (untrusted.daemonise, ("ok", "daemonised")),
    ],
)
def test_whatever_a_call_started_ends_with_it(function, result, tmp_path):
    note = tmp_path / "pid"
    assert call(function, path=str(note)) == result
    assert not is_alive(int(note.read_text()))


def test_whatever_a_call_started_ends_when_its_time_is_up(tmp_path):
    note = tmp_path / "pid"
    late = failed("Timed out after 2 s.")
    assert call(untrusted.daemonise_and_sleep, timeout_s=2.0, path=str(note)) == late
    assert becomes(lambda: not is_alive(int(note.read_text())))


STARTS_A_PROCESS = """
import os, subprocess, sys, time

def work():
    return "worked"

if sys.argv[0].endswith("isolated_worker.py"):  # else it is imported by whoever calls
    child = subprocess.Popen(["sleep", "600"])
    with open({path!r} + ".new", "w") as file:
        file.write(str(child.pid))
    os.rename({path!r} + ".new", {path!r})
    {then}
"""


@pytest.fixture
def import_that(tmp_path, monkeypatch):
    """Writes a module that starts a process when a worker imports it; where its id is noted."""

    def write(then):
        name = f"starts_{tmp_path.name}"
        text = STARTS_A_PROCESS.format(path=str(tmp_path / "pid"), then=then)
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return name, tmp_path / "pid"

    return write


@pytest.mark.parametrize(
    ("then", "result"),
    [
        ("raise ValueError('no')", failed("ValueError: no")),
        ("time.sleep(600)", failed("Timed out after 5 s.")),
    ],
)
def test_what_an_import_started_ends_when_it_fails(import_that, then, result):
    name, path = import_that(then)
    work = importlib.import_module(name).work
    assert call(work, timeout_s=5.0) == result
    assert becomes(lambda: not is_alive(int(path.read_text())))


def test_a_caller_that_is_killed_while_a_worker_imports_leaves_nothing(import_that):
    name, path = import_that("time.sleep(600)")
    script = f"from tool_calls import *\nimport {name}\nfrom agent_vllm.tools import isolated\n"
    script += f"run([ask()], [isolated(tool({name}.work))], 600)"
    places = os.pathsep.join([PYTHONPATH, str(path.parent)])
    caller = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": places}
    )
    try:
        give_up = time.monotonic() + 60
        while not path.exists() and time.monotonic() < give_up:
            time.sleep(0.05)
        started = int(path.read_text())
        assert is_alive(started)
    finally:
        caller.kill()
        caller.wait()
    assert becomes(lambda: not is_alive(started))


def test_secrets_are_not_inherited(monkeypatch):
    monkeypatch.setenv("API_TOKEN", "secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    _, content = call(untrusted.environment)
    assert "LANG" in json.loads(content) and "API_TOKEN" not in json.loads(content)
    _, content = call(untrusted.environment, limits={"environment": ["API_TOKEN"]})
    assert "API_TOKEN" in json.loads(content) and "LANG" not in json.loads(content)


def local():
    def inner():
        return 1

    return inner


@pytest.mark.parametrize(
    "function",
    [
        lambda: 1,
        local(),
        functools.partial(untrusted.add, 1, 2),
        untrusted.Box().method,
        len.__call__,
    ],
)
def test_what_has_no_name_to_be_found_by_is_refused(function):
    with pytest.raises(ToolDefinitionError, match=r"`f` can't be isolated: .*at the top level"):
        isolated(tool(function))


@pytest.mark.parametrize("limits", [{"cpu_s": 0}, {"memory_mb": -1}, {"max_output_bytes": 1.5}])
def test_limits_that_are_none(limits):
    with pytest.raises(ToolDefinitionError, match=r"must be a whole number above 0, got"):
        isolated(untrusted.add, **limits)


# ---- warm workers ----


def warm(function, **limits):
    """Calls it again and again; each gives (status, content)."""
    wrapped = isolated(tool(function, **limits.pop("properties", {})), warm=True, **limits)
    return lambda timeout_s=20.0, **arguments: run([ask(**arguments)], [wrapped], timeout_s)[0]


def test_a_warm_call_finds_what_the_import_left():
    call = warm(untrusted.count)
    results = [json.loads(call()[1]) for _ in range(3)]
    assert len({parent for _, parent in results}) == 1  # one worker forked for them all
    assert [num_calls for num_calls, _ in results] == [1, 1, 1]


def test_a_warm_worker_outlives_what_its_calls_do():
    call = warm(untrusted.do, properties={"what": {}})
    first = call(what="count")
    for function, result in ENDINGS:
        assert call(what=function.__name__) == result
    assert call(what="count") == first


def test_each_warm_call_has_its_processor_time():
    call = warm(untrusted.use_processor, cpu_s=1, properties={"seconds": {}})
    assert [call(seconds=0.6) for _ in range(2)] == [("ok", "used")] * 2


@pytest.mark.parametrize(
    ("what", "result"),
    [
        ("sleep", failed("Timed out after 1 s.")),
        ("kill_the_worker", failed("Ended without a result: killed by SIGKILL.")),
    ],
)
def test_a_worker_that_is_lost_is_replaced(what, result):
    call = warm(untrusted.do, properties={"what": {}})
    first = json.loads(call(what="count")[1])[1]
    assert call(what=what, timeout_s=1.0) == result
    assert becomes(lambda: not is_alive(first))
    second = json.loads(call(what="count")[1])[1]
    assert second != first


def test_warm_calls_side_by_side_have_a_worker_each_and_workers_end_with_the_tool():
    wrapped = isolated(tool(untrusted.count), warm=True)
    wrapped = dataclasses.replace(wrapped, max_concurrency=3)
    results = run([ask() for _ in range(6)], [wrapped], timeout_s=30.0)
    workers = {json.loads(content)[1] for _, content in results}
    assert 1 <= len(workers) <= 3 and all(map(is_alive, workers))
    del wrapped

    def are_gone():  # the event loop may still be at the end of the last call
        gc.collect()
        return not any(map(is_alive, workers))

    assert becomes(are_gone)


SCRIPT = '''
def double(a: int) -> int:
    """
    Double it.

    Args:
        a: what
    """
    return 2 * a

if __name__ == "__main__":  # nothing heavy above, as every call imports it
    import asyncio
    from agent_vllm.tools import ToolRunner, isolated, tools_by_name
    from agent_vllm.types import ToolCall

    call = ToolCall(name="double", arguments={"a": 21})
    runner = ToolRunner()
    print(asyncio.run(runner.run([call], tools_by_name([isolated(double)])))[0].content)
'''


def test_a_function_of_the_script_that_is_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("42\n", 0), done.stderr
