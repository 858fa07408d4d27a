"""Load single-call tasks of the Berkeley Function Calling Leaderboard (v4) as an RL task set.

Owns the rows, their tools, the call check, the rewards and a short supervised warm start. Reads
the data from the installed package `bfcl-eval` (Apache-2.0) and imports none of its code.
Invariant: a function that is the answer of a test row is never the answer of a training row.
"""

import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

CATEGORIES = ("simple_python", "multiple")  # one correct call; one offered function, or 2 to 4
FORMAT_REWARD = 0.1
TEST_SHARE_PERCENT = 25

Row = dict[str, Any]
Message = Mapping[str, Any]

# Where BFCL's type names differ from JSON schema's. ("any" becomes no type at all.)
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array"}


def load_bfcl(
    split: Literal["train", "test"],
    num_tasks: int | None = None,
    seed: int = 0,
    max_prompt_chars: int = 1200,
) -> list[Row]:
    """Return the rows of one split, in an order set by `seed`.

    Args:
        split: the answer's function decides the split; about three quarters are for training.
        num_tasks: number of rows, those with the shortest prompts; None for all.
        seed: shuffles the chosen rows; does not change which rows are chosen.
        max_prompt_chars: skips rows whose question and function schemas are longer together. 1200
            characters are at most 415 tokens of SmolLM2, chat template included.

    Returns:
        Rows with `id`; `prompt` (chat messages); `functions` (JSON text: schemas in transformers'
        form, dots in names replaced by underscores); and `ground_truth` (JSON text:
        `{function: {parameter: [acceptable values]}}`, where "" marks an optional parameter).

    Raises:
        FileNotFoundError: the package `bfcl-eval` is not installed.
    """
    if split not in ("train", "test"):
        raise ValueError(f'split must be "train" or "test", got {split!r}.')
    rows = [row for row in _all_rows() if _split_of(row) == split]
    rows = [row for row in rows if _prompt_chars(row) <= max_prompt_chars]
    rows = sorted(rows, key=_prompt_chars)[:num_tasks]
    random.Random(seed).shuffle(rows)
    return rows


def _all_rows() -> Iterator[Row]:
    for category in CATEGORIES:
        records = read_records(f"possible_answer/BFCL_v4_{category}.json")
        answers = {record["id"]: record["ground_truth"] for record in records}
        for record in read_records(f"BFCL_v4_{category}.json"):
            yield _row(record, answers[record["id"]])


def read_records(name: str) -> list[dict[str, Any]]:
    """Return the records of a file in the package's data folder.

    Raises:
        FileNotFoundError: the package `bfcl-eval` is not installed.
    """
    spec = find_spec("bfcl_eval")  # found, not imported: its code needs much else
    if spec is None or spec.origin is None:
        raise FileNotFoundError("No tasks. Run: pip install --no-deps bfcl-eval==2026.3.23")
    with (Path(spec.origin).parent / "data" / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _row(record: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> Row:
    (messages,) = record["question"]  # one turn
    ((name, acceptable),) = answers[0].items()
    (function,) = (function for function in record["function"] if function["name"] == name)
    required = function["parameters"].get("required", [])
    acceptable = {  # two rows mark a required parameter as optional too
        key: [value for value in values if value != "" or key not in required]
        for key, values in acceptable.items()
    }
    return {
        "id": record["id"],
        "prompt": messages,
        "functions": json.dumps([function_schema(function) for function in record["function"]]),
        "ground_truth": json.dumps({_tool_name(name): acceptable}),
    }


def _tool_name(name: str) -> str:
    # As BFCL does for models whose tool names can't have dots.
    return name.replace(".", "_")


def function_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a BFCL function description to transformers' tool schema."""
    name, parameters = _tool_name(function["name"]), _json_schema(function["parameters"])
    described = {**function, "name": name, "parameters": parameters}
    return {"type": "function", "function": described}


def _json_schema(bfcl_schema: Mapping[str, Any]) -> dict[str, Any]:
    # "optional" is BFCL's own word; "required" says the same.
    schema = {key: value for key, value in bfcl_schema.items() if key != "optional"}
    if schema.get("type") == "any":
        del schema["type"]
    elif "type" in schema:
        schema["type"] = _JSON_TYPES.get(schema["type"], schema["type"])
    if "items" in schema:
        schema["items"] = _json_schema(schema["items"])
    if "properties" in schema:
        properties = schema["properties"].items()
        schema["properties"] = {name: _json_schema(value) for name, value in properties}
    return schema


def _split_of(row: Row) -> str:
    # By the answer's function, as a split by row would leak: 96 questions are asked twice.
    (name,) = json.loads(row["ground_truth"])
    percent = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 100
    return "test" if percent < TEST_SHARE_PERCENT else "train"


def _prompt_chars(row: Row) -> int:
    return len(row["functions"]) + sum(len(message["content"]) for message in row["prompt"])


def check_call(
    name: str, arguments: Mapping[str, Any], ground_truth: Mapping[str, Mapping[str, list]]
) -> bool:
    """Return whether a call is correct by the rule of BFCL's AST check.

    The name must match; every argument must be known and have an acceptable value;
    a parameter may be omitted only if "" is among its values. Strings are compared without
    case, spaces and the characters `,./-_*^`; an int passes for a float, never a float or a bool
    for an int; lists in order, element by element; dicts by the same rule as the arguments.

    Args:
        ground_truth: a row's `ground_truth`, parsed: `{function: {parameter: [values]}}`.
    """
    return name in ground_truth and _fits(arguments, ground_truth[name])


def _fits(arguments: Any, acceptable: Mapping[str, list]) -> bool:
    return (
        isinstance(arguments, Mapping)
        and arguments.keys() <= acceptable.keys()
        and all(_is_acceptable(value, acceptable[key]) for key, value in arguments.items())
        and all(key in arguments or "" in values for key, values in acceptable.items())
    )


def _is_acceptable(value: Any, acceptable: list) -> bool:
    if value == "" and not all(isinstance(wanted, str) for wanted in acceptable):
        return False  # here "" only marks the parameter as optional
    return any(_is_same(value, wanted) for wanted in acceptable)


def _is_same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return _fits(value, wanted)
    if isinstance(wanted, list):
        alike = isinstance(value, list) and len(value) == len(wanted)
        return alike and all(map(_is_same, value, wanted))
    if isinstance(wanted, str):
        return isinstance(value, str) and _plain(value) == _plain(wanted)
    if type(value) is int and isinstance(wanted, float):
        return value == wanted
    return type(value) is type(wanted) and value == wanted


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')


def call_reward(
    completions: Sequence[Sequence[Message]], ground_truth: Sequence[str], **kwargs: Any
) -> list[float]:
    """Return 1.0 if the first message with calls makes exactly one call, the correct one; else 0.0.

    As in BFCL, later messages are not judged. `kwargs` takes the dataset's other columns, which TRL
    passes to every reward.
    """
    judged = zip(map(_first_calls, completions), map(json.loads, ground_truth), strict=True)
    return [
        float(len(calls) == 1 and check_call(calls[0]["name"], calls[0]["arguments"], truth))
        for calls, truth in judged
    ]


def format_reward(completions: Sequence[Sequence[Message]], **kwargs: Any) -> list[float]:
    """Return 0.1 if the first message with calls makes exactly one call that its tool accepted.

    Shaping for models that don't call tools yet: argument values do not matter.
    """
    return [
        FORMAT_REWARD * (len(_first_calls(completion)) == 1 and not _has_error(completion))
        for completion in completions
    ]


def _first_calls(completion: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the calls, `[{"name", "arguments"}, ...]`, of the first message that has any."""
    for message in completion:
        if message["role"] == "assistant" and message.get("tool_calls"):
            return [call["function"] for call in message["tool_calls"]]
    return []


def _has_error(completion: Sequence[Message]) -> bool:
    """Return whether the first tool message reports an error (JSON with the key "error")."""
    answers = [message["content"] for message in completion if message["role"] == "tool"]
    try:
        result = json.loads(answers[0]) if answers else None
    except json.JSONDecodeError:
        return False
    return isinstance(result, dict) and "error" in result


def row_tools(row: Row) -> list[tuple[dict[str, Any], Callable[..., str]]]:
    """Return the schema and a callable for each function of a row.

    A few arithmetic functions really run: `{"result": ...}`. All others only acknowledge the call
    with `{"status": "recorded"}`: the call is what is rewarded.
    """
    schemas = json.loads(row["functions"])
    return [(schema, _tool_function(schema["function"]["name"])) for schema in schemas]


def _tool_function(name: str) -> Callable[..., str]:
    def function(**arguments: Any) -> str:
        if name in _IMPLEMENTATIONS:
            return json.dumps({"result": _IMPLEMENTATIONS[name](**arguments)})
        return json.dumps({"status": "recorded"})

    function.__name__ = name
    return function


def _triangle_area(base: float, height: float, unit: str = "") -> float:
    return base * height / 2


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "calculate_triangle_area": _triangle_area,
    "geometry_area_triangle": _triangle_area,
    "geometry_circumference": lambda radius, units="": 2 * math.pi * radius,
    "math_gcd": lambda num1, num2: math.gcd(num1, num2),
    "math_hcf": lambda number1, number2: math.gcd(number1, number2),
    "math_lcm": lambda num1, num2: math.lcm(num1, num2),
    "number_theory_gcd": lambda number1, number2: math.gcd(number1, number2),
    "rectangle_area": lambda length, width: length * width,
}


def reference_call(row: Row) -> dict[str, Any]:
    """Return a correct call, `{"name", "arguments"}`: first acceptable values, nothing optional."""
    ((name, acceptable),) = json.loads(row["ground_truth"]).items()
    return {"name": name, "arguments": _first_values(acceptable)}


def _first_values(acceptable: Mapping[str, list]) -> dict[str, Any]:
    return {key: _chosen(values[0]) for key, values in acceptable.items() if "" not in values}


def _chosen(value: Any) -> Any:
    """Pick an argument from an acceptable value, in which dicts list acceptable values again."""
    if isinstance(value, dict):
        return _first_values(value)
    return [_chosen(item) for item in value] if isinstance(value, list) else value


def warm_start(
    model_path: str | Path,
    output_dir: str | Path,
    num_steps: int = 24,
    *,
    batch_size: int = 4,
    learning_rate: float = 2e-4,
    max_prompt_chars: int = 600,
    seed: int = 0,
) -> Path:
    """Fine-tune a model on correct calls of training rows; save it with its tokenizer.

    Each row is the prompt with its tools, the correct call, the tool's answer and a short closing
    message. Only the model's own tokens are trained, by TRL's `SFTTrainer`, all weights in float32.
    The tokenizer's chat template must have `{% generation %}` marks.

    Returns:
        `output_dir`.
    """
    # Imported here because the tasks alone need none of it.
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    rows = load_bfcl("train", max_prompt_chars=max_prompt_chars, seed=seed)
    config = SFTConfig(
        output_dir=str(output_dir),
        max_steps=num_steps,
        per_device_train_batch_size=1,  # no padding, and the activations of one row at a time
        gradient_accumulation_steps=batch_size,
        learning_rate=learning_rate,
        warmup_steps=max(1, num_steps // 10),
        max_length=None,  # `max_prompt_chars` is the limit: no row is cut
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        seed=seed,
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype="float32"),
        args=config,
        train_dataset=Dataset.from_list([_supervised(row, tokenizer) for row in rows]),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(output_dir))
    return Path(output_dir)


def _supervised(row: Row, tokenizer: Any) -> dict[str, list[int]]:
    """Return `input_ids` and `assistant_masks` (both `[T]`) of a row's whole conversation."""
    call = reference_call(row)
    functions = {schema["function"]["name"]: function for schema, function in row_tools(row)}
    answer = functions[call["name"]](**call["arguments"])
    tool_calls = [{"type": "function", "function": call}]
    turns = [
        {"role": "assistant", "content": "", "tool_calls": tool_calls},
        {"role": "tool", "name": call["name"], "content": answer},
        {"role": "assistant", "content": "Done."},
    ]
    tokens = tokenizer.apply_chat_template(
        [*row["prompt"], *turns],
        tools=json.loads(row["functions"]),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return {key: tokens[key] for key in ("input_ids", "assistant_masks")}
