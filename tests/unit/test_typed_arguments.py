"""Arguments with types that JSON doesn't have: what the model reads, and what the function gets."""

import enum
import json
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from fakes import call, user
from pydantic import BaseModel, ConfigDict, Field
from tool_calls import ask, run, tool
from transformers.utils import get_json_schema

from agent_vllm.environments import Environments
from agent_vllm.errors import ToolDefinitionError
from agent_vllm.rollout import rollout_batch
from agent_vllm.tools import as_tool, isolated


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Point:
    x: int
    y: int = 0


class Order(BaseModel):
    model_config = ConfigDict(strict=True)

    day: date
    colour: Colour
    points: list[Point] = []


class Tree(BaseModel):
    name: str
    children: list["Tree"] = []


class Opaque:
    pass


def taking(hint, default=...):
    """A function of one argument with this hint, and the list of what it got."""
    got: list[Any] = []

    def f(value) -> str:
        """Take a value.

        Args:
            value: What to take.
        """
        got.append(value)
        return "taken"

    f.__annotations__ = {"value": hint, "return": str}
    if default is not ...:
        f.__defaults__ = (default,)
    return f, got


@pytest.mark.parametrize(
    ("hint", "sent", "value"),
    [
        (Colour, "red", Colour.RED),
        (Level, 2, Level.HIGH),
        (date, "2026-01-02", date(2026, 1, 2)),
        (datetime, "2026-01-02T03:04:05", datetime(2026, 1, 2, 3, 4, 5)),
        (Decimal, "0.1", Decimal("0.1")),
        (Decimal, 3, Decimal(3)),
        (Path, "a/b", Path("a/b")),
        (UUID, "12345678123456781234567812345678", UUID("12345678123456781234567812345678")),
        (Point, {"x": 1}, Point(1)),
        (
            Order,
            {"day": "2026-01-02", "colour": "blue", "points": [{"x": 1, "y": 2}]},
            Order(day=date(2026, 1, 2), colour=Colour.BLUE, points=[Point(1, 2)]),
        ),
        (
            Tree,
            {"name": "a", "children": [{"name": "b"}]},
            Tree(name="a", children=[Tree(name="b")]),
        ),
        (list[Colour], ["red", "blue"], [Colour.RED, Colour.BLUE]),
        (dict[str, Point], {"a": {"x": 1}}, {"a": Point(1)}),
        (dict[int, str], {"1": "one"}, {1: "one"}),
        (set[int], [1, 2], {1, 2}),
        (tuple[int, ...], [1, 2], (1, 2)),
        (Colour | None, None, None),
        (Colour | None, "red", Colour.RED),
        (Point | Colour, "red", Colour.RED),
        (Annotated[int, Field(ge=1)], 1, 1),
    ],
)
def test_the_function_gets_what_its_hint_says(hint, sent, value):
    function, got = taking(hint)
    assert run([ask(value=sent)], [function]) == [("ok", "taken")]
    assert got == [value] and type(got[0]) is type(value)


@pytest.mark.parametrize(
    ("hint", "sent"),
    [
        (Colour, "green"),
        (date, "tomorrow"),
        (UUID, "1"),
        (Point, {"x": "one"}),
        (Order, {"day": "2026-13-01", "colour": "red"}),
        (Annotated[int, Field(ge=1)], 0),
        (Tree, {"name": "a", "children": [{}]}),
    ],
)
def test_what_does_not_fit_is_an_invalid_call(hint, sent):
    function, got = taking(hint)
    ((status, content),) = run([ask(value=sent)], [function])
    assert status == "invalid" and got == []
    assert json.loads(content)["error"].startswith("Wrong arguments for 'f': value")


def test_null_is_taken_where_it_is_the_default():
    function, got = taking(date, default=None)
    assert run([ask(value=None), ask()], [function]) == [("ok", "taken")] * 2
    assert got == [None, None]


def test_the_model_reads_the_values_without_references():
    function, _ = taking(Colour | None)
    (value,) = as_tool(function).schema["function"]["parameters"]["properties"].values()
    assert value == {
        "type": "string",
        "enum": ["red", "blue"],
        "title": "Colour",
        "nullable": True,
        "description": "What to take.",
    }
    assert "$ref" not in json.dumps(as_tool(taking(Order)[0]).schema)


@pytest.mark.parametrize("hint", [int, str | None, list[str], dict[str, Any], Literal["a", 1], Any])
def test_json_types_are_described_as_by_transformers(hint):
    function, _ = taking(hint)
    assert as_tool(function).schema == get_json_schema(function)
    assert as_tool(function).converters == {}


def positional(a: int, /) -> str:
    """Take.

    Args:
        a: A number.
    """
    return ""


def several(*numbers: int) -> str:
    """Take.

    Args:
        numbers: Numbers.
    """
    return ""


def named(**numbers: int) -> str:
    """Take.

    Args:
        numbers: Numbers.
    """
    return ""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (positional, "Argument `a` must be one that can be given by name, got `a: int`"),
        (several, r"Argument `numbers` must be one that can be given by name, got `\*numbers"),
        (named, r"Argument `numbers` must be one that can be given by name, got `\*\*numbers"),
        (taking(Opaque)[0], "Argument `value` must have a type that JSON can say, got .*Opaque"),
        (taking(Literal[Colour.RED])[0], "Only the valid python literals"),
        (taking(list[Opaque])[0], "Argument `value` must have a type that JSON can say"),
    ],
)
def test_what_no_call_could_give_is_refused(function, message):
    with pytest.raises(ToolDefinitionError, match=message):
        as_tool(function)


def paint(colour: Colour) -> str:
    """Paint.

    Args:
        colour: Its colour.
    """
    return colour.name


def test_isolated_tools_take_json_alone():
    with pytest.raises(
        ToolDefinitionError, match="arguments of isolated tool `paint` must be JSON"
    ):
        isolated(paint)


def test_a_schema_of_the_users_own_gives_plain_json():
    got = []
    given = tool(lambda colour: got.append(colour), colour={"type": "string"})
    assert run([ask(colour="red")], [given]) == [("ok", "null")]
    assert got == ["red"]


class House:
    def reset(self, **row) -> None:
        pass

    def paint(self, colour: Colour) -> str:
        """Paint the house.

        Args:
            colour: Its colour.
        """
        return colour.name


def test_methods_of_an_environment_get_what_their_hints_say(chat, scripted):
    with Environments(House) as environments:
        (started,) = environments.start([{"prompt": user()}])
        engine = scripted([call("paint", colour="red"), "a"])
        (t,) = rollout_batch(engine, chat, [started.messages], [started.tools])
    assert [r.content for r in t.tool_results] == ["RED"]
