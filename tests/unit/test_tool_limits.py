"""Each tool's own limits (calls at one time, calls per second, retries), and schemas that are
refused."""

import asyncio
import dataclasses
import threading
import time
from typing import Optional

import pytest
from fakes import add
from tool_calls import ask, failed, run, schema, tool

from agent_vllm.errors import ToolDefinitionError
from agent_vllm.tools import Tool, ToolRunner, arguments, as_tool, select_tools, tools_by_name


class Meter:
    """A function that knows how many calls of it ran at one time, and when each began."""

    def __init__(self):
        self.running = self.most = 0
        self.began_s = []
        self._lock = threading.Lock()

    def __call__(self):
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.began_s.append(time.monotonic())
        time.sleep(0.01)
        with self._lock:
            self.running -= 1


def limited(function, **limits):
    return dataclasses.replace(tool(function), **limits)


def test_no_more_calls_of_one_tool_at_one_time_than_it_allows():
    meter, free = Meter(), Meter()
    tools = [limited(meter, max_concurrency=2), Tool(schema=schema("free"), function=free)]
    run([ask(), ask("free")] * 6, tools)
    assert (meter.most, len(meter.began_s), len(free.began_s)) == (2, 6, 6)
    assert free.most > 2


def test_rows_that_build_their_tool_anew_share_its_places():
    meter = Meter()

    async def work():
        runner = ToolRunner()
        rows = [tools_by_name([limited(meter, max_concurrency=1)]) for _ in range(4)]
        await asyncio.gather(*(runner.run([ask()], row) for row in rows))

    asyncio.run(work())
    assert (meter.most, len(meter.began_s)) == (1, 4)


def test_calls_begin_no_faster_than_the_tool_allows():
    meter, start_s = Meter(), time.monotonic()
    run([ask()] * 4, [limited(meter, max_calls_per_s=20)])
    for index, began_s in enumerate(sorted(meter.began_s)):
        assert began_s - start_s >= 0.05 * index


def test_waiting_for_a_place_ends_with_the_time_left():
    release = threading.Event()

    async def work():
        runner = ToolRunner(timeout_s=None)
        tools = tools_by_name([limited(release.wait, max_concurrency=1)])
        results = await runner.run([ask(), ask()], tools, timeout_s=0.1)
        release.set()
        return [(result.status, result.content) for result in results]

    assert asyncio.run(work()) == [
        failed("Timed out after 0.1 s."),
        failed("Not run: no place was free in time."),
    ]


class Flaky:
    def __init__(self, num_failures):
        self.num_calls, self.num_failures = 0, num_failures

    def __call__(self):
        self.num_calls += 1
        if self.num_calls <= self.num_failures:
            raise ConnectionError(f"call {self.num_calls}")
        return "at last"


@pytest.mark.parametrize(
    ("num_failures", "max_retries", "result", "num_calls"),
    [
        (1, 0, failed("ConnectionError: call 1"), 1),
        (1, 2, ("ok", "at last"), 2),
        (2, 2, ("ok", "at last"), 3),
        (9, 2, failed("ConnectionError: call 3"), 3),
    ],
)
def test_only_a_tool_that_says_so_is_called_again(num_failures, max_retries, result, num_calls):
    flaky = Flaky(num_failures)
    assert run([ask()], [limited(flaky, max_retries=max_retries)]) == [result]
    assert flaky.num_calls == num_calls


def test_no_retry_without_time_for_it():
    flaky = Flaky(9)

    async def work():
        tools = tools_by_name([limited(flaky, max_retries=9)])
        return await ToolRunner().run([ask()], tools, timeout_s=0.05)

    assert asyncio.run(work())[0].status == "failed"
    assert flaky.num_calls == 1


def test_a_call_that_ran_out_of_time_is_made_again():
    release, calls = threading.Event(), []

    def slow_at_first():
        calls.append(1)
        return release.wait() if len(calls) == 1 else "quick"

    try:
        again = limited(slow_at_first, max_retries=1)
        assert run([ask()], [again], timeout_s=0.1) == [("ok", "quick")]
    finally:
        release.set()


def test_a_row_that_brings_its_own_schema_keeps_the_tools_limits():
    limits = {"max_concurrency": 3, "max_calls_per_s": 2.0, "max_retries": 1}
    own = dataclasses.replace(as_tool(add), ends_episode=True, **limits)
    (selected,) = select_tools([schema("add")], {"add": own})
    assert selected.schema == schema("add")
    assert dataclasses.replace(selected, schema=own.schema).__dict__ == own.__dict__


@pytest.mark.parametrize("limits", [{"max_concurrency": 0}, {"max_calls_per_s": -1.0}])
def test_limits_that_nothing_could_pass(limits):
    with pytest.raises(ToolDefinitionError, match=r"`max_.*` of tool `f` must be more than 0"):
        limited(add, **limits)


def test_negative_retries():
    with pytest.raises(ToolDefinitionError, match="`max_retries` of tool `f` must be 0 or more"):
        limited(add, max_retries=-1)


# ---- schemas ----


def with_parameters(parameters):
    function = {"name": "f", "description": "f", "parameters": parameters}
    return Tool(schema={"type": "function", "function": function}, function=lambda **_: "ran")


def test_a_schema_that_is_none():
    with pytest.raises(ToolDefinitionError, match="tool `f` are no JSON schema"):
        with_parameters({"type": "objekt"})
    with pytest.raises(ToolDefinitionError, match="tool `f` are no JSON schema"):
        with_parameters({"properties": {"a": {"pattern": "("}}})
    with pytest.raises(ToolDefinitionError, match="tool `f` are no JSON: "):
        with_parameters({"properties": {"a": {"default": object()}}})


@pytest.mark.parametrize("key", ["name", "description"])
def test_a_description_that_is_no_text(key):
    function = {"name": "f", "description": "f", key: ["f"]}
    with pytest.raises(ToolDefinitionError, match=rf"`{key}` must be text, got \['f'\]"):
        Tool(schema={"type": "function", "function": function}, function=add)


@pytest.mark.parametrize("reference", ["#/$defs/none", "http://127.0.0.1:9/schema.json"])
def test_a_schema_that_refers_outside_of_itself(reference):
    with pytest.raises(ToolDefinitionError, match=rf"refer to '{reference}'".replace("$", r"\$")):
        with_parameters({"properties": {"a": {"$ref": reference}}})


def test_a_schema_that_refers_to_its_own_parts():
    parameters = {
        "properties": {"a": {"$ref": "#/$defs/number"}},
        "$defs": {"number": {"type": "integer"}},
    }
    tool = with_parameters(parameters)
    assert run([ask(a=1)], [tool]) == [("ok", "ran")]
    assert run([ask(a="1")], [tool])[0][0] == "invalid"


def test_arguments_nested_deeper_than_can_be_checked():
    parameters = {"properties": {"a": {"$ref": "#/$defs/tree"}}}
    parameters["$defs"] = {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}
    deep = []
    for _ in range(2000):
        deep = [deep]
    ((status, content),) = run([ask(a=deep)], [with_parameters(parameters)])
    assert status == "invalid" and "arguments: nested too deeply" in content


# ---- the check of arguments ----


def checked(schema, value):
    """The status of a call with this value for an argument of this schema."""
    (result,) = run([ask(a=value)], [with_parameters({"properties": {"a": schema}})])
    return result


@pytest.mark.parametrize(
    ("value", "status"), [(19.99, "ok"), (0.07, "ok"), (5, "ok"), (19.995, "invalid")]
)
def test_multiples_are_counted_in_decimal_numbers(value, status):
    assert checked({"type": "number", "multipleOf": 0.01}, value)[0] == status


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("nest", [lambda x: x, lambda x: {"b": [1, x]}])
def test_numbers_that_json_does_not_have_are_refused(value, nest):
    status, content = checked({}, nest(value))
    assert status == "invalid" and f"{value} is not a JSON number" in content


@pytest.mark.parametrize(
    ("schema", "value", "status"),
    [
        ({"type": "number", "multipleOf": 0.01}, 10**400, "ok"),
        ({"type": "number", "multipleOf": 3}, 10**400, "invalid"),
        ({"type": "number", "multipleOf": 1e-320}, 1e300, "ok"),
        pytest.param({"type": "string"}, 10**5000, "invalid", id="unprintable"),
    ],
)
def test_numbers_that_no_float_holds_end_in_a_result(schema, value, status):
    assert checked(schema, value)[0] == status


def test_whatever_the_check_raises_makes_the_call_invalid(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("the checker's own")

    monkeypatch.setattr(arguments, "_exact", broken)
    status, content = checked({"multipleOf": 2}, 4)
    assert status == "invalid" and "can't be checked (ZeroDivisionError" in content


NODE = {
    "$dynamicAnchor": "node",
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$dynamicRef": "#node"}}},
}


def test_dynamic_references_are_resolved():
    parameters = {"properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}}
    tree = with_parameters(parameters)
    good, bad = {"kids": [{"kids": []}]}, {"kids": [{"kids": [3]}]}
    assert [status for status, _ in run([ask(a=good), ask(a=bad)], [tree])] == ["ok", "invalid"]


def test_a_dynamic_reference_to_nothing_is_refused_with_the_tool():
    with pytest.raises(ToolDefinitionError, match="refer to '#node', which is not in them"):
        with_parameters({"properties": {"a": {"$dynamicRef": "#node"}}})


def test_references_are_resolved_against_the_part_that_they_stand_in():
    part = {"$id": "http://x/part", "$ref": "#/$defs/b", "$defs": {"b": {"type": "integer"}}}
    assert checked(part, 3)[0] == "ok"


def test_data_that_looks_like_a_reference_is_none():
    assert checked({"enum": [{"$ref": "#/nowhere"}]}, {"$ref": "#/nowhere"})[0] == "ok"


# ---- null for optional arguments ----


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "nullable": True},
        {"type": "string", "default": None},
        {"enum": ["a"], "nullable": True},
        {"$ref": "#/properties/b", "nullable": True},
    ],
)
def test_null_is_taken_where_the_schema_says_so(schema):
    tool = with_parameters({"properties": {"a": schema, "b": {"type": "string"}}})
    assert [run([ask(a=value)], [tool])[0][0] for value in (None, "a", 3)] == [
        "ok",
        "ok",
        "invalid",
    ]


def test_optional_arguments_take_null():
    def book(
        day: str | None = None,
        seats: Optional[list[int | None]] = None,  # noqa: UP045
        price: float = None,  # noqa: RUF013
        count: int = 1,
    ) -> str:
        """
        Book a table.

        Args:
            day: when
            seats: which
            price: of it
            count: of them
        """
        return f"{day} {seats} {price} {count}"

    calls = [
        ask("book", day=None, seats=None, price=None),
        ask("book", day="Monday", seats=[1, None]),
        ask("book", count=None),
    ]
    assert run(calls, [book])[:2] == [("ok", "None None None 1"), ("ok", "Monday [1, None] None 1")]
    assert run(calls, [book])[2][0] == "invalid"
