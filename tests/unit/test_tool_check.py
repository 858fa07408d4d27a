"""Tools are tried through the chat template before anything is sampled."""

import pytest
from fakes import CHATML, add, chatml_tokenizer, user
from families import accepted, assistant, chat_of, sampled_turn

from agent_vllm.chat import ChatFormat, example_call
from agent_vllm.errors import ToolDefinitionError
from agent_vllm.rollout import rollout_batch
from agent_vllm.tools import Tool
from agent_vllm.types import StopReason, ToolCall

TEXT = {"type": "string"}
LFM2 = {name for name in accepted() if name.startswith("lfm2")} - {"lfm2", "lfm2_training"}
GEMMA4 = {name for name in accepted() if "gemma" in name}


def tool(name, **properties):
    """A tool whose schema may refer to `#/$defs/count`."""
    parameters = {
        "type": "object",
        "properties": properties,
        "$defs": {"count": {"type": "integer"}, "tree": {"$ref": "#/$defs/tree"}},
    }
    function = {"name": name, "description": "To do it.", "parameters": parameters}
    return Tool(schema={"type": "function", "function": function}, function=lambda **_: "done")


def refusing(checked):
    """Return the families that refuse this tool."""

    def refuses(chat):
        try:
            chat.check_tools([checked])
        except ToolDefinitionError:
            return True
        return False

    return {name for name in accepted() if refuses(chat_of(name))}


# ---- values that a family writes as text ----

VALUES = {
    "a reference": ({"$ref": "#/$defs/count"}, 5),
    "all of": ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, 5),
    "one of": ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, 5),
    "one of, null": ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, None),
    "a constant": ({"const": 5}, 5),
    "a constant that is text": ({"const": "5"}, "5"),
    "one of these": ({"enum": [3, "a", None]}, 3),
    "one of these, text": ({"enum": [3, "a", None]}, "a"),
    "number or text": ({"type": ["integer", "string"]}, 5),
    "text or number": ({"type": ["string", "integer"]}, "five"),
    "text in quotes or number": ({"type": ["string", "integer"]}, '"5"'),
    "text or list": ({"anyOf": [TEXT, {"type": "array"}]}, [1, "a"]),
    "text that is no list": ({"anyOf": [TEXT, {"type": "array"}]}, "5"),
    "text or nothing": ({"type": "string", "nullable": True}, None),
    "an object of many": ({"properties": {"a": TEXT}, "type": "object"}, {"a": "5"}),
    "anything": ({}, {"a": [1]}),
    "a reference to itself": ({"$ref": "#/$defs/tree"}, {"a": 1}),
    "whole numbers as numbers": ({"type": "number"}, 2),
}


@pytest.mark.parametrize("kind", VALUES)
def test_the_value_is_what_the_template_wrote(kind):
    schema, value = VALUES[kind]
    offered = tool("record", it=schema)
    call = ToolCall(name="record", arguments={"it": value})
    for name in accepted():
        chat = chat_of(name)
        before, sampled = sampled_turn(chat, assistant([call]), tools=[offered])
        read = chat.parse(sampled, before, [offered]).calls
        assert [repr(c.arguments) for c in read] == [repr({"it": value})], name


# ---- tools that can be called, and others ----


def test_names_that_each_family_carries():
    for name in ("get_weather", "mcp__fs__read_file", "GetWeather2"):
        assert refusing(tool(name, city=TEXT)) == set()
    for name in ("get-weather", "fs/read", "fs:read", "mcp__fs__read-file"):
        assert refusing(tool(name, city=TEXT)) == LFM2
    assert refusing(tool("fs.read", city=TEXT)) == set()


def test_argument_names_that_each_family_carries():
    assert refusing(tool("look", city=TEXT, the_city=TEXT)) == set()
    for name in ("from", "user-id", "user.id"):
        assert refusing(tool("look", **{name: TEXT})) == LFM2
    for name in ("$top", "a b", "a[]"):
        assert refusing(tool("look", **{name: TEXT})) == LFM2 | GEMMA4


@pytest.mark.parametrize("kind", VALUES)
def test_no_schema_of_these_is_refused(kind):
    assert refusing(tool("look", it=VALUES[kind][0])) == set()


def test_the_refusal_names_what_to_change():
    chat = chat_of("lfm2_2_5")
    with pytest.raises(ToolDefinitionError) as error:
        chat.check_tools([tool("look"), tool("get-weather", city=TEXT)])
    assert "`get-weather` can't be called" in str(error.value)
    assert "[get-weather(city='Oslo')]" in str(error.value)
    assert str(error.value).endswith("Use letters, digits and underscores in the tool's name.")
    with pytest.raises(ToolDefinitionError, match=r"argument 'from' of `look`.*Rename the argum"):
        chat.check_tools([tool("look", to=TEXT, **{"from": TEXT})])


def test_a_parser_of_another_family_is_refused(tokenizer, scripted):
    chat = ChatFormat.from_tokenizer(tokenizer, parser="lfm2")
    with pytest.raises(
        ToolDefinitionError, match=r"`add` can't be called.*no call that can be read.*`parser`"
    ):
        rollout_batch(scripted([]), chat, [user()], [[add]])


def test_a_template_that_can_not_write_the_schema():
    strict = CHATML + "{% if tools %}{{ raise_exception('no tools today') }}{% endif %}"
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(strict))
    with pytest.raises(ToolDefinitionError, match=r"can't write the tool `add`.*no tools today"):
        chat.check_tools([Tool(function=add)])


def test_a_row_whose_tool_can_not_be_called_ends_alone(scripted):
    name = "{{ call.function.name }}"
    lossy = CHATML.replace(name, "{{ call.function.name | replace('x', '') }}")
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(lossy))
    bad, good = rollout_batch(
        scripted(["fine"]), chat, [user("a"), user("b")], [[tool("x")], [tool("ok")]]
    )
    assert bad.stop_reason == StopReason.ENVIRONMENT_ERROR
    assert "`x` can't be called" in bad.error
    assert good.stop_reason == StopReason.ANSWERED


def test_each_tool_is_tried_once(chat):
    seen = []

    def parser(turn):
        seen.append(turn.text)
        return chat.parser(turn)

    counting = ChatFormat.from_tokenizer(chat.tokenizer, parser=parser)
    for _ in range(3):
        counting.check_tools([tool("look", city=TEXT), tool("note", text=TEXT)])
    assert len(seen) == 2


# ---- examples ----


def test_an_example_has_each_argument():
    def node(**more):
        return {"type": "object", "properties": {"name": TEXT, **more}}

    parameters = {
        "type": "object",
        "properties": {
            "city": TEXT,
            "count": {"type": ["null", "integer"]},
            "ratio": {"type": "number"},
            "flag": {"type": "boolean"},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "array", "items": {"type": "integer"}},
            "where": {"allOf": [node(), node(size={"type": "integer"})]},
            "tree": {"$ref": "#/$defs/tree"},
            "any": True,
        },
        "anyOf": [{"required": ["city"]}, {"required": ["count"]}],
        "$defs": {"tree": node(child={"$ref": "#/$defs/tree"})},
    }
    schema = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    call = example_call(Tool(schema=schema, function=print))
    assert call.arguments == {
        "city": "Oslo",
        "count": 3,
        "ratio": 2.5,
        "flag": True,
        "unit": "C",
        "days": [3],
        "where": {"name": "Oslo", "size": 3},
        "tree": {},
        "any": "Oslo",
    }
