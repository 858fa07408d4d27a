"""MCP tools, from real servers in processes of their own: over stdio and over HTTP."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from fakes import add
from paths import ROOT, TESTS
from tool_calls import ask, failed, run

from agent_vllm.errors import ToolDefinitionError, ToolServerError
from agent_vllm.tools import McpTools, ToolRunner, tools_by_name

pytest.importorskip("mcp")

SERVER = [sys.executable, str(TESTS / "mcp_server.py")]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def serving(port):
    process = subprocess.Popen([*SERVER, str(port)])
    try:
        while process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url():
    with serving(free_port()) as url:
        yield url


@pytest.fixture(scope="module", params=["stdio", "http"])
def server(request):
    if request.param == "stdio":
        where = {"command": SERVER}
    else:
        where = {"url": request.getfixturevalue("url"), "headers": {"X-Who": "test"}}
    with McpTools(**where) as tools:
        yield tools


@pytest.fixture
def own():
    """A server that a test may break."""
    with McpTools(command=SERVER) as tools:
        yield tools


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_servers_tools_are_tools(server):
    assert [tool.name for tool in server][:3] == ["add", "meet", "wait"]
    function = server[0].schema["function"]
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["required"] == ["a", "b"]
    assert server[:1] == [server[0]] and len(server) == 10


def test_text_and_structured_content_and_what_is_neither(server):
    calls = [ask("add", a=1, b=2), ask("two_texts"), ask("structured"), ask("picture")]
    assert run(calls, server) == [
        ("ok", "3"),
        ("ok", "one\nzwei é"),
        ("ok", '{"n": 1, "é": [true, null]}'),
        failed("The result holds image data, but only text can be shown."),
    ]


def test_a_tool_that_fails_is_a_failed_result(server):
    assert run([ask("fail")], server) == [failed("Error executing tool fail: out of stock")]


def test_arguments_are_checked_before_the_server_sees_them(server):
    assert run([ask("add", a="1", b=2)], server)[0][0] == "invalid"


def test_calls_run_side_by_side():
    with McpTools(command=SERVER) as tools:
        assert run([ask("meet", num_guests=3)] * 3, tools) == [("ok", "met")] * 3


def test_a_call_that_never_returns_times_out_and_the_session_goes_on(server):
    assert run([ask("wait")], server, timeout_s=0.2) == [failed("Timed out after 0.2 s.")]
    assert run([ask("add", a=1, b=2), ask("add", a=3, b=4)], [*server]) == [
        ("ok", "3"),
        ("ok", "7"),
    ]


def test_beside_other_tools_and_from_other_threads(server):
    others = [tool for tool in server if tool.name != "add"]
    outcomes = []

    def work():
        outcomes.append(run([ask("add", a=1, b=2), ask("two_texts")], [add, *others]))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [[("ok", "3"), ("ok", "one\nzwei é")]] * 3


def test_inside_a_running_loop(server):
    async def work():
        return await ToolRunner().run([ask("add", a=1, b=2)], tools_by_name(server))

    assert asyncio.run(work())[0].content == "3"


def test_the_server_sees_no_secrets_but_those_it_is_given(monkeypatch):
    monkeypatch.setenv("API_TOKEN", "secret")
    with McpTools(command=SERVER, environment={"GIVEN": "1"}) as tools:
        ((_, content),) = run([ask("environment")], tools)
    assert "GIVEN" in content.split() and "API_TOKEN" not in content.split()


def test_close_ends_the_process(own):
    ((_, pid),) = run([ask("pid")], own)
    assert is_alive(int(pid))
    own.close()
    own.close()
    assert not is_alive(int(pid))
    ended = failed("The session with the tool's server has ended.")
    assert run([ask("add", a=1, b=2)], own) == [ended]


def test_a_server_that_dies_fails_its_calls_alone_and_is_started_again(own):
    results = run([ask("die"), ask("add", a=1, b=2)], [own[-1], add])
    assert results[1] == ("ok", "3")
    assert results[0][0] == "failed" and "Connection closed" in results[0][1]
    assert run([ask("add", a=1, b=2)] * 3, own, timeout_s=20.0) == [("ok", "3")] * 3


def test_a_server_that_is_killed_and_served_again_is_reached_again():
    port = free_port()
    with serving(port) as url:
        tools = McpTools(url=url)
    with tools:
        gone = [run([ask("add", a=1, b=2)], tools, timeout_s=20.0)[0] for _ in range(3)]
        assert [status for status, _ in gone] == ["failed"] * 3
        assert "The tool's server is gone; next attempt in" in gone[2][1]
        with serving(port):
            time.sleep(1.1)  # the pause after one failed attempt
            assert run([ask("add", a=1, b=2)], tools, timeout_s=20.0) == [("ok", "3")]


def test_a_call_that_can_not_be_sent_leaves_the_server_as_it_is(own):
    ((_, pid),) = run([ask("pid")], own)
    with pytest.raises(Exception, match="serialize"):
        asyncio.run(own[0].function(a=object(), b=2))
    assert run([ask("pid")], own, timeout_s=20.0) == [("ok", pid)]


LEFT_OPEN = """
import sys
from agent_vllm.tools import McpTools
tools = McpTools(command=[sys.executable, sys.argv[1]])
print(len(tools))
"""


def test_a_program_that_forgets_to_close_ends_all_the_same():
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, SERVER[1]],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("10\n", "", 0)


# ---- servers that are none ----


def answering(*tools):
    """A program that answers every request and lists these tools."""
    body = json.dumps({"tools": [{"inputSchema": {"type": "object"}, **tool} for tool in tools]})
    return f"""
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    result = json.loads({body!r}) if request["method"] == "tools/list" else {{
        "protocolVersion": "2025-06-18", "capabilities": {{"tools": {{}}}},
        "serverInfo": {{"name": "x", "version": "1"}}}}
    answer = {{"jsonrpc": "2.0", "id": request["id"], "result": result}}
    if request["method"] == "server/discover":
        answer.pop("result")
        answer["error"] = {{"code": -32601, "message": "Method not found"}}
    print(json.dumps(answer), flush=True)
"""


def program(source):
    return [sys.executable, "-u", "-c", source]


def test_a_hand_written_server_will_do():
    with McpTools(command=program(answering({"name": "a"}, {"name": "b"}))) as tools:
        assert [tool.name for tool in tools] == ["a", "b"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys; sys.exit('no key was set')", r"failed: .*stderr:\nno key was set"),
        ("print('hello'); input(); input()", r"did not answer in 1 s.*is no MCP: 'hello'"),
        ("import time; time.sleep(600)", r"did not answer in 1 s\.$"),
    ],
)
def test_a_program_that_is_no_server(source, message):
    with pytest.raises(ToolServerError, match=f"(?s){message}"):
        McpTools(command=program(source), timeout_s=1)


def test_a_program_that_is_not_there():
    with pytest.raises(ToolServerError, match="server `/no/such/program` failed: FileNotFound"):
        McpTools(command=["/no/such/program"])


def test_an_address_where_nobody_listens():
    with pytest.raises(ToolServerError, match=r"server `http://127.0.0.1:\d+/mcp` failed: Connect"):
        McpTools(url=f"http://127.0.0.1:{free_port()}/mcp", timeout_s=5)


def test_two_tools_of_one_name():
    with pytest.raises(ToolDefinitionError, match="Two tools are named `a`"):
        McpTools(command=program(answering({"name": "a"}, {"name": "a"})))


def test_a_schema_that_is_none():
    broken = {"name": "a", "inputSchema": {"type": "object", "properties": {"x": {"type": "int"}}}}
    with pytest.raises(ToolDefinitionError, match="`a` are no JSON schema: 'int' is not valid"):
        McpTools(command=program(answering(broken)))


@pytest.mark.parametrize("where", [{}, {"command": ["x"], "url": "y"}, {"command": "x y"}])
def test_one_place(where):
    with pytest.raises(ValueError, match="Give either `command` "):
        McpTools(**where)
