"""Run multi-turn tasks of the Berkeley Function Calling Leaderboard (v4), or train on them.

Owns the rows, one world per trajectory (its tools and its user) and the ground-truth policy. The
worlds' classes and the checks of state and responses come from the installed package `bfcl-eval`
(Apache-2.0); its `eval` of model output is not used. Invariant: a task passes only if every user
turn was reached and left the same state as the ground truth.

    python examples/bfcl_multi_turn.py --model Qwen/Qwen3-0.6B --num-tasks 20
    python examples/bfcl_multi_turn.py --model Qwen/Qwen3-0.6B --train-steps 50
"""

import argparse
import ast
import copy
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from bfcl import function_schema, read_records

from agent_vllm import (
    ChatFormat,
    Limits,
    RolloutEngine,
    RolloutStatus,
    Tool,
    Trajectory,
    create_rollout_engine,
    rollout_batch,
)
from agent_vllm.inspect import RolloutProgress
from agent_vllm.tools import ToolFailure

Row = dict[str, Any]
Call = tuple[str, list[Any], dict[str, Any]]  # name, positional and keyword arguments


# Its ground truth gives text where the function's own schema asks for a whole number.
_CONTRADICTORY = "multi_turn_base_173"


def load_multi_turn(num_tasks: int | None = None) -> list[Row]:
    """Load the category `multi_turn_base` in the package's order, or its first `num_tasks` rows.

    Of its 200 rows one is left out: its ground truth does not fit its own tools.

    Returns:
        Rows with `id`; `prompt` (the first user turn, as chat messages); and `task` (JSON text:
        what `World` needs).

    Raises:
        FileNotFoundError: the package `bfcl-eval` is not installed.
    """
    records = read_records("possible_answer/BFCL_v4_multi_turn_base.json")
    answers = {record["id"]: record["ground_truth"] for record in records}
    records = read_records("BFCL_v4_multi_turn_base.json")
    rows = [_row(r, answers[r["id"]]) for r in records if r["id"] != _CONTRADICTORY]
    return rows[:num_tasks]


def _row(record: Mapping[str, Any], ground_truth: list[list[str]]) -> Row:
    first, *later = record["question"]
    task = {
        "classes": record["involved_classes"],
        "config": record["initial_config"],
        "excluded": record.get("excluded_function", []),
        "user_turns": ["\n".join(message["content"] for message in turn) for turn in later],
        "ground_truth": ground_truth,
    }
    return {"id": record["id"], "prompt": first, "task": json.dumps(task)}


class World:
    """Hold one trajectory's world: `tools` act on it, `next_user_message` is its user.

    After each answer the finished turn is checked by BFCL's rule: the state equals the one that the
    ground truth's calls leave in a copy of the world, and the model has seen what they return, in
    this turn or before.
    """

    def __init__(self, row: Row) -> None:
        task = json.loads(row["task"])
        self.tools: list[Tool] = []
        self._user_turns = list(task["user_turns"])
        self._ground_truth = [list(map(parse_call, turn)) for turn in task["ground_truth"]]
        self._instances = _instances(task)
        self._twin = _instances(task)
        self._responses: list[str] = []
        self._num_calls = 0  # of the turn
        self._turns_passed: list[bool] = []
        for name, instance in self._instances.items():
            docs = [doc for doc in _docs(name) if doc["name"] not in task["excluded"]]
            self.tools += [self._tool(instance, doc) for doc in docs]

    @property
    def passed(self) -> bool:
        """Return whether all turns were reached and passed."""
        return len(self._turns_passed) == len(self._ground_truth) and all(self._turns_passed)

    def next_user_message(self, _: Sequence[Mapping[str, Any]]) -> str | None:
        self._turns_passed.append(self._is_right(self._ground_truth[len(self._turns_passed)]))
        self._num_calls = 0
        return self._user_turns.pop(0) if self._user_turns else None

    def _tool(self, instance: Any, doc: Mapping[str, Any]) -> Tool:
        method = getattr(instance, doc["name"])

        async def function(**arguments: Any) -> str:  # async, so that calls run in order
            self._num_calls += 1
            response, failed = _respond(method, [], arguments)
            self._responses.append(response)
            if failed:
                raise ToolFailure(response)
            return response

        return Tool(schema=function_schema(doc), function=function)

    def _is_right(self, ground_truth: Sequence[Call]) -> bool:
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import (
            response_checker,
            state_checker,
        )

        methods = _methods(self._twin)
        wanted = [_respond(methods[name], args, kwargs)[0] for name, args, kwargs in ground_truth]
        if not ground_truth:
            return True  # nothing can be done, whatever was tried
        return (
            self._num_calls > 0
            and state_checker(self._instances, self._twin)["valid"]
            and response_checker(self._responses, wanted, len(self._turns_passed))["valid"]
        )


class MultiTurnEnvironment:
    """Wrap a world as the trainer's environment: its tools, its user and its reward."""

    def reset(self, **row: Any) -> None:
        self._world = World(row)

    def get_tools(self) -> list[Tool]:
        return self._world.tools

    def get_user_message(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        return self._world.next_user_message(messages)

    def get_reward(self) -> float:
        return float(self._world.passed)


def parse_call(text: str) -> Call:
    """Parse a ground-truth call such as `f(1, b="x")`, whose arguments are literals."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name), text
    keywords = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
    return call.func.id, list(map(ast.literal_eval, call.args)), keywords


def ground_truth_turns(row: Row) -> list[str]:
    """Return the turns of a policy that follows the ground truth, in Hermes form, with answers."""
    task = json.loads(row["task"])
    methods = _methods(_instances(task))
    turns = []
    for calls in task["ground_truth"]:
        drafted = [_hermes(methods, *parse_call(call)) for call in calls]
        turns += ["\n".join(drafted), "Done."] if drafted else ["I can't."]
    return turns


def _hermes(
    methods: Mapping[str, Callable[..., Any]], name: str, args: list[Any], kwargs: dict[str, Any]
) -> str:
    arguments = inspect.signature(methods[name]).bind(*args, **kwargs).arguments
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def evaluate(
    engine: RolloutEngine, chat: ChatFormat, rows: Sequence[Row], **options: Any
) -> list[tuple[bool, Trajectory]]:
    """Return whether each row passed, and its trajectory; `options` go to `rollout_batch`."""
    worlds = [World(row) for row in rows]
    trajectories = rollout_batch(
        engine,
        chat,
        [row["prompt"] for row in rows],
        [world.tools for world in worlds],
        users_batch=[world.next_user_message for world in worlds],
        **options,
    )
    return [(w.passed, t) for w, t in zip(worlds, trajectories, strict=True)]


def _config() -> Any:
    return import_module("bfcl_eval.constants.executable_backend_config")


def _instances(task: Mapping[str, Any]) -> dict[str, Any]:
    made = {}
    for name in task["classes"]:
        made[name] = getattr(import_module(_config().CLASS_FILE_PATH_MAPPING[name]), name)()
        if name not in _config().STATELESS_CLASSES:
            made[name]._load_scenario(copy.deepcopy(task["config"].get(name, {})))
    return made


@functools.cache
def _docs(class_name: str) -> list[dict[str, Any]]:
    file = _config().MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_name]
    return read_records(f"multi_turn_func_doc/{file}")


def _methods(instances: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    return {
        name: method
        for instance in instances.values()
        for name, method in inspect.getmembers(instance, inspect.ismethod)
        if not name.startswith("_")
    }


def _respond(
    method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, bool]:
    """Return a call's result as BFCL writes it, and whether it raised."""
    try:
        value = method(*args, **kwargs)
    except Exception as error:  # the worlds raise many kinds, at what a model may well ask for
        return f"Error during execution: {error}", True
    if isinstance(value, dict):
        try:
            return json.dumps(value), False
        except TypeError:
            return str(value), False
    return str(value), False


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--model", required=True, help="`smollm2`, `tiny`, a folder, or a Hugging Face id"
    )
    parser.add_argument("--engine", default="vllm", help="vllm (default) or torch")
    parser.add_argument("--num-tasks", type=int, default=None, help="number of tasks; default: all")
    parser.add_argument("--max-turns", type=int, default=64, help="assistant turns; default: 64")
    parser.add_argument(
        "--max-new-tokens", type=int, default=1024, help="sampled tokens per turn; default: 1024"
    )
    parser.add_argument(
        "--train-steps", type=int, default=0, help="train for this many steps instead of testing"
    )
    parser.add_argument(
        "--num-generations", type=int, default=8, help="samples per task in training; default: 8"
    )
    parser.add_argument(
        "--output-dir", default="runs/bfcl-multi-turn", help="output folder of training"
    )
    return parser.parse_args()


def test(model: Any, tokenizer: Any, rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Run each task once, greedily."""
    limits = Limits(
        max_turns=args.max_turns, max_new_tokens=args.max_new_tokens, max_tool_result_tokens=1024
    )
    status = RolloutStatus()
    with create_rollout_engine(args.engine, model, tokenizer) as engine:
        chat = ChatFormat.from_tokenizer(tokenizer, eos_token_ids=engine.eos_token_ids)
        with RolloutProgress(status, f"{len(rows)} tasks"):
            options = {"limits": limits, "temperature": 0.0, "seed": 0, "status": status}
            results = evaluate(engine, chat, rows, **options)
    for row, (passed, trajectory) in zip(rows, results, strict=True):
        print(
            f"{row['id']}: {'passed' if passed else 'failed'}, {trajectory.stop_reason} after "
            f"{trajectory.num_turns} turns and {len(trajectory.tool_results)} calls"
        )
    print(f"{sum(passed for passed, _ in results)} of {len(results)} tasks passed")


def train(model: Any, tokenizer: Any, rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Train with GRPO; the reward is whether the task passed."""
    from datasets import Dataset

    from trl_integration import AgentGRPOConfig, AgentGRPOTrainer

    config = AgentGRPOConfig(
        args.output_dir,
        max_steps=args.train_steps,
        per_device_train_batch_size=args.num_generations,
        num_generations=args.num_generations,
        max_turns=args.max_turns,
        max_new_tokens=args.max_new_tokens,
        max_tool_result_tokens=1024,
        max_completion_length=4096,
        bf16=False,
        logging_steps=1,
        report_to="none",
        record_rollouts=True,
    )
    trainer = AgentGRPOTrainer(
        model,
        args=config,
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer,
        environment_factory=MultiTurnEnvironment,
        rollout_engine=args.engine,
    )
    try:
        trainer.train()
        trainer.save_model()
    finally:
        trainer.close()


def model_path(name: str) -> str:
    if name == "smollm2":
        return str(import_module("smollm2").smollm2_path())
    return str(import_module("tiny_agent").tiny_agent_path()) if name == "tiny" else name


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    args = parse_arguments()
    path = model_path(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    run = train if args.train_steps else test
    run(model, tokenizer, load_multi_turn(args.num_tasks), args)


if __name__ == "__main__":
    main()
