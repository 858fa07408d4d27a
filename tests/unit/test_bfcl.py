"""The tasks in `examples/bfcl.py`: rows, the check of a call, rewards and tools. Loads no model."""

import inspect
import json
from importlib.util import find_spec

import jsonschema
import pytest
from bfcl import (
    FORMAT_REWARD,
    call_reward,
    check_call,
    format_reward,
    load_bfcl,
    reference_call,
    row_tools,
)

if find_spec("bfcl_eval") is None:
    pytest.skip("needs the package bfcl-eval", allow_module_level=True)

ALL = 10**9  # characters: no row is left out


@pytest.fixture(scope="module")
def train() -> list[dict]:
    return load_bfcl("train", max_prompt_chars=ALL)


@pytest.fixture(scope="module")
def test() -> list[dict]:
    return load_bfcl("test", max_prompt_chars=ALL)


def assistant(*calls: tuple[str, dict]) -> dict:
    if not calls:
        return {"role": "assistant", "content": "words"}
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    tool_calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def tool(content: str) -> dict:
    return {"role": "tool", "name": "f", "content": content}


# ---- Rows ----


def test_split_is_disjoint_and_fixed(train, test):
    assert (len(train), len(test)) == (465, 135)
    for what in (
        lambda row: row["id"],
        lambda row: row["prompt"][0]["content"].lower(),
        lambda row: next(iter(json.loads(row["ground_truth"]))),
    ):
        assert not set(map(what, train)) & set(map(what, test))


def test_split_name_is_checked():
    with pytest.raises(ValueError, match="split must be"):
        load_bfcl("dev")


def test_few_tasks_are_the_shortest(test):
    def size(row):
        return len(row["functions"]) + len(row["prompt"][0]["content"])

    few = load_bfcl("test", 5, max_prompt_chars=ALL)
    assert sorted(map(size, few)) == sorted(map(size, test))[:5]


def test_seed_sets_the_order_only():
    rows, again, other = (load_bfcl("test", 10, seed=seed) for seed in (0, 0, 1))
    assert rows == again != other
    assert sorted(row["id"] for row in rows) == sorted(row["id"] for row in other)


def test_prompts_are_capped():
    rows = load_bfcl("train", max_prompt_chars=600)
    assert rows
    assert all(len(row["functions"]) + len(row["prompt"][0]["content"]) <= 600 for row in rows)


def test_schemas_are_json_schemas(train, test):
    for row in train + test:
        schemas = [schema["function"] for schema in json.loads(row["functions"])]
        names = [schema["name"] for schema in schemas]
        assert len(set(names)) == len(names), row["id"]
        assert all(name.isidentifier() for name in names), row["id"]
        for schema in schemas:
            jsonschema.Draft202012Validator.check_schema(schema["parameters"])


# ---- The check ----

TRUTH = {
    "f": {
        "count": [3],
        "rate": [0.5, 2.0],
        "city": ["New York", "NYC"],
        "unit": ["", "km"],
        "limit": ["", 10],
        "points": ["", [1, 2], ["a b", "c"]],
        "filter": ["", {"by": ["name"], "order": ["asc", ""]}],
    }
}
GOOD = {"count": 3, "rate": 0.5, "city": "New York"}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rate": 2},
        {"city": "nyc"},
        {"city": "new-york."},
        {"unit": "KM"},
        {"unit": ""},
        {"limit": 10},
        {"points": [1, 2]},
        {"points": ["AB", "c"]},
        {"filter": {"by": "Name"}},
        {"filter": {"by": "name", "order": "asc"}},
    ],
    ids=str,
)
def test_right_calls(change):
    assert check_call("f", GOOD | change, TRUTH)


@pytest.mark.parametrize(
    "change",
    [
        {"count": 4},
        {"count": 3.0},
        {"count": "3"},
        {"count": None},
        {"rate": "0.5"},
        {"rate": True},
        {"city": "York"},
        {"city": ["New York"]},
        {"unit": "miles"},
        {"limit": ""},
        {"limit": True},
        {"points": [2, 1]},
        {"points": [1]},
        {"points": [1, 2, 3]},
        {"points": [1, True]},
        {"points": "12"},
        {"filter": {}},
        {"filter": {"order": "asc"}},
        {"filter": {"by": "name", "more": 1}},
        {"filter": {"by": "name", "order": "desc"}},
        {"filter": "name"},
        {"more": 1},
    ],
    ids=str,
)
def test_wrong_calls(change):
    assert not check_call("f", GOOD | change, TRUTH)


@pytest.mark.parametrize("name", GOOD)
def test_a_required_argument_is_missing(name):
    assert not check_call("f", {key: GOOD[key] for key in GOOD if key != name}, TRUTH)


def test_wrong_function():
    assert not check_call("g", GOOD, TRUTH)


def test_arguments_of_no_dict():
    assert not check_call("f", [3, 0.5, "NYC"], TRUTH)


def test_reference_calls_are_right_and_fit_their_schemas(train, test):
    for row in train + test:
        call = reference_call(row)
        assert check_call(call["name"], call["arguments"], json.loads(row["ground_truth"])), row
        schemas = {schema["function"]["name"]: schema for schema, _ in row_tools(row)}
        jsonschema.validate(call["arguments"], schemas[call["name"]]["function"]["parameters"])


# ---- Rewards ----

RIGHT, WRONG = ("f", GOOD), ("f", GOOD | {"count": 4})


@pytest.mark.parametrize(
    ("completion", "right", "well_formed"),
    [
        ([], False, False),
        ([assistant()], False, False),
        ([assistant(RIGHT)], True, True),
        ([assistant(WRONG)], False, True),
        ([assistant(RIGHT, RIGHT)], False, False),
        ([assistant(RIGHT), tool('{"status": "recorded"}'), assistant()], True, True),
        ([assistant(), assistant(RIGHT)], True, True),
        ([assistant(RIGHT), tool("5"), assistant(WRONG), tool("6")], True, True),
        ([assistant(WRONG), tool('{"error": "no"}'), assistant(RIGHT)], False, False),
        ([assistant(RIGHT), tool("not JSON")], True, True),
    ],
)
def test_rewards(completion, right, well_formed):
    columns = {"ground_truth": [json.dumps(TRUTH)], "id": ["x"]}
    assert call_reward(completions=[completion], **columns) == [float(right)]
    assert format_reward(completions=[completion], **columns) == [FORMAT_REWARD * well_formed]


def test_each_completion_meets_its_own_truth():
    completions = [[assistant(RIGHT)], [assistant(RIGHT)]]
    assert call_reward(completions, [json.dumps(TRUTH), '{"g": {}}']) == [1.0, 0.0]
    with pytest.raises(ValueError):
        call_reward(completions, [json.dumps(TRUTH)])


# ---- Tools ----


def test_every_reference_call_is_answered(train, test):
    kinds = set()
    for row in train + test:
        functions = {schema["function"]["name"]: function for schema, function in row_tools(row)}
        call = reference_call(row)
        kinds |= set(json.loads(functions[call["name"]](**call["arguments"])))
    assert kinds == {"result", "status"}


def test_some_functions_really_run():
    row = {"functions": json.dumps([{"type": "function", "function": {"name": "math_gcd"}}])}
    ((_, gcd),) = row_tools(row)
    assert gcd(num1=40, num2=50) == '{"result": 10}'
    with pytest.raises(TypeError):
        gcd(first=40, second=50)


def test_real_functions_take_every_parameter_of_their_schema(train, test):
    from bfcl import _IMPLEMENTATIONS

    for row in train + test:
        for schema, _ in row_tools(row):
            function = schema["function"]
            if function["name"] in _IMPLEMENTATIONS:
                known = inspect.signature(_IMPLEMENTATIONS[function["name"]]).parameters
                assert set(function["parameters"]["properties"]) <= set(known), row["id"]
