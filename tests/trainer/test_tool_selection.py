"""Check which tools a dataset row offers."""

import json

import pytest
from datasets import Dataset
from fakes import add, shout, user
from tiny_tasks import get_price
from trainers import REWARDS, build
from worlds import Counter

from agent_vllm.chat import ChatFormat
from agent_vllm.errors import ToolDefinitionError
from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.tools import Tool, as_tool, select_tools, tools_by_name

TOOLS = tools_by_name([add, shout])


def names(column):
    return [tool.name for tool in select_tools(column, TOOLS)]


def test_no_column_means_all_tools():
    assert names(None) == ["add", "shout"]


def test_an_empty_list_means_none():
    assert names([]) == []


def test_names_in_the_rows_order():
    assert names(["shout", "add"]) == ["shout", "add"]
    assert names('["shout"]') == ["shout"]


def test_a_schema_replaces_the_tools_own():
    schema = json.loads(json.dumps(as_tool(add).schema))
    schema["function"]["description"] = "Another text."
    (tool,) = select_tools([schema], TOOLS)
    assert tool.schema["function"]["description"] == "Another text."
    assert tool.function is add


def test_the_tool_keeps_what_it_ends():
    final = {"add": Tool(schema=as_tool(add).schema, function=add, ends_episode=True)}
    (tool,) = select_tools([as_tool(add).schema], final)
    assert tool.ends_episode


@pytest.mark.parametrize("column", [["nope"], [{"function": {"name": "nope"}}], '["nope"]'])
def test_a_tool_that_the_trainer_lacks_is_refused_by_name(column):
    with pytest.raises(ToolDefinitionError, match=r"names 'nope'.*Its tools are: add, shout"):
        select_tools(column, TOOLS)


def test_keys_that_arrow_fills_in_are_taken_out(chat):
    """Rows with other tools come back from Arrow with each other's parameters set to None."""
    features = [[dict(as_tool(add).schema)], [dict(as_tool(shout).schema)]]
    filled = Dataset.from_list([{"tools": tools} for tools in features])[0]["tools"]
    text = chat.tokenizer.decode(chat.prompt_ids(user(), select_tools(filled, TOOLS)))
    plain = chat.tokenizer.decode(chat.prompt_ids(user(), [as_tool(add)]))
    assert '"text"' not in text and "null" not in text
    schemas = [json.loads(t.splitlines()[1]) for t in (text, plain)]
    assert schemas[0] == schemas[1]


def test_none_is_taken_out_at_every_depth():
    properties = {"a": {"type": "integer", "enum": None}, "text": None}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    schema = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    (tool,) = select_tools([schema], TOOLS)
    assert tool.schema["function"]["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
    }


def test_schemas_may_be_a_json_string():
    (tool,) = select_tools(json.dumps([as_tool(add).schema]), TOOLS)
    assert tool.schema == as_tool(add).schema


@pytest.mark.parametrize(
    "offered", [{"tools": [get_price]}, {"environment_factory": Counter}], ids=["list", "methods"]
)
def test_tools_are_tried_before_training(agent, tmp_path, offered):
    chat = ChatFormat.from_tokenizer(agent[1], parser="lfm2")
    engine = ScriptedRolloutEngine(agent[1], [])
    with pytest.raises(ToolDefinitionError, match=r"`\w+` can't be called"):
        build(agent, tmp_path, engine, reward_funcs=REWARDS, chat_format=chat, **offered)
