"""The Python interpreter: each call has its own output, and ends with its process."""

import sys
import textwrap
from dataclasses import replace

import pytest
from fakes import by_prompt, user
from fakes import call as written_call
from tool_calls import ask, failed, run

from agent_vllm.errors import ToolDefinitionError
from agent_vllm.rollout import rollout_batch
from agent_vllm.tools import MAX_RESULT_CHARS, PythonInterpreter

PYTHON = PythonInterpreter()


def result(code, tool=PYTHON, timeout_s=20.0):
    return run([ask("python", code=textwrap.dedent(code))], [tool], timeout_s)[0]


def test_what_is_printed_and_the_last_value_come_back():
    assert result("print('a'); print('b', end='')\n1 + 1") == ("ok", "a\nb\n2")
    assert result("x = 3\nx * 'a'") == ("ok", "'aaa'")
    assert result("x = 3") == ("ok", "")
    assert result("print('a')\nNone") == ("ok", "a")


def test_all_ways_to_write_are_seen():
    code = """
        import os, subprocess, sys
        print("print")
        print("stderr", file=sys.stderr)
        sys.stdout.flush()
        os.write(1, b"descriptor\\n")
        subprocess.run(["echo", "process"])
        print("é 汉")
    """
    assert result(code) == ("ok", "print\nstderr\ndescriptor\nprocess\né 汉")


def test_an_error_is_a_traceback_of_the_code_alone():
    status, text = result("print('before')\ndef f():\n    return 1 / 0\nf()")
    assert status == "ok"
    assert text.splitlines()[:3] == [
        "before",
        "Traceback (most recent call last):",
        '  File "<code>", line 4, in <module>',
    ]
    assert "return 1 / 0" in text and text.endswith("ZeroDivisionError: division by zero")
    assert "python_process" not in text
    assert result("1 +")[1].endswith("SyntaxError: invalid syntax")
    assert result("raise SystemExit(3)") == ("ok", "SystemExit: 3")
    assert result("print(1); exit()") == ("ok", "1")
    assert "EOFError" in result("input()")[1]


def test_eight_at_once_have_their_own_output_and_this_stdout_stays(chat, scripted):
    before = sys.stdout
    turns = {
        f"n{n}": [
            written_call(
                "python", code=f"import time\nfor _ in range(20):\n  print({n})\n  time.sleep(0.01)"
            ),
            "done",
        ]
        for n in range(8)
    }
    rows = rollout_batch(
        scripted(by_prompt(chat, **turns)), chat, [user(name) for name in turns], [[PYTHON]] * 8
    )
    assert [row.tool_results[0].content.split() for row in rows] == [
        [str(n)] * 20 for n in range(8)
    ]
    assert sys.stdout is before


def test_calls_share_nothing():
    assert result("import os\nkept = 1\nopen('f', 'w').close()\nos.listdir()") == ("ok", "['f']")
    assert result("import os\n'kept' in globals(), os.listdir()") == ("ok", "(False, [])")


def test_limits():
    tool = PythonInterpreter(cpu_s=1, memory_mb=200, max_output_chars=50)
    used_up = failed("Ended without a result: 1 s of processor time used up.")
    assert result("while True: pass", tool) == used_up
    assert result("x = 'a' * 10**9", tool)[1].endswith("MemoryError")
    assert result("print('é' * 70)", tool) == (
        "ok",
        "é" * 50 + "\n[... output cut after 50 characters]",
    )
    assert result("'a' * 70", tool)[1].split("\n")[1] == "[... 22 characters cut]"
    assert "output cut" in result("while True: print('a' * 1000)", tool)[1]
    assert result("import time\ntime.sleep(60)", tool, 0.5) == failed("Timed out after 0.5 s.")
    assert result("print('still there')", tool) == ("ok", "still there")


def test_the_longest_output_passes():
    tool = PythonInterpreter(max_output_chars=MAX_RESULT_CHARS)
    assert result(f"print('\\x01' * {MAX_RESULT_CHARS - 1})", tool)[1] == "\x01" * (
        MAX_RESULT_CHARS - 1
    )


def test_it_is_a_tool_with_options():
    tool = PythonInterpreter(ends_episode=True, max_concurrency=2)
    assert (tool.name, tool.ends_episode, tool.max_concurrency) == ("python", True, 2)
    other = replace(
        tool, schema={**tool.schema, "function": {**tool.schema["function"], "name": "py"}}
    )
    assert run([ask("py", code="2 * 3")], [other], 20.0) == [("ok", "6")]
    assert run([ask("python", cod="1")], [tool], 20.0)[0][0] == "invalid"


@pytest.mark.parametrize("limit", [{"cpu_s": 0}, {"memory_mb": 1.5}, {"max_output_chars": None}])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(ToolDefinitionError, match="must be a whole number above 0, got"):
        PythonInterpreter(**limit)
