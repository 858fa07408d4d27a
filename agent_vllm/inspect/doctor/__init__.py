"""Is a model, with its template and your tools, fit for multi-turn training? One row a check.

It looks at what goes wrong silently: the chat template between turns, end tokens, masks and their
shift, calls that aren't read, engines whose logprobs or weights are not the learner's. Tools are
not run. Exit status 1 if a check fails.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from agent_vllm.chat import ResponseParser
from agent_vllm.engines import RolloutEngine
from agent_vllm.inspect.doctor.engine_checks import (
    ENGINE_CHECKS,
    MODEL_CHECKS,
    TOLERANCE,
    TOLERANCE_HALF,
    EngineState,
    LearnerState,
)
from agent_vllm.inspect.doctor.findings import Finding, Report
from agent_vllm.inspect.doctor.subject import SubjectState, Tools
from agent_vllm.inspect.doctor.template_checks import TEMPLATE_CHECKS
from agent_vllm.types import Messages

DEFAULT_PROMPTS = ("What is the weather in Oslo?", "What is 17 times 23?")
_COLOURS = {"pass": "green", "note": "cyan", "fail": "bold red", "skipped": "yellow"}
_ENGINES = {"torch": ["torch"], "vllm": ["vllm"], "both": None}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def get_weather(city: str) -> str:
    """
    Tell the weather.

    Args:
        city: where
    """
    return f"It rains in {city}."


def examine(
    model: PreTrainedModel | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    tools: Tools | str | Path = (get_weather,),
    prompts: Sequence[str | Messages] = DEFAULT_PROMPTS,
    engines: Sequence[str | RolloutEngine] | None = None,
    parser: ResponseParser | str | None = None,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    on_finding: Callable[[Finding], None] = lambda _: None,
) -> Report:
    """Check a model for multi-turn rollouts. What is wrong with it is a finding, not an error.

    Args:
        model: a causal language model (only read), or a path or id to load one from.
        tokenizer: its tokenizer; loaded from the path when left out.
        tools: functions or `Tool` objects, or a Python file that has them. They are not run.
        prompts: at least one: a user's text or a conversation.
        engines: names, or engines that were built from this model and are left open with its
            weights. By default torch, and vLLM where it is installed; empty for the template's
            checks alone, which need no weights.
        parser: as in `ChatFormat.from_tokenizer`.
        dtype: of a model that is loaded here.
        tolerance: nats between the engine's and the learner's logprobs at the worst token; by
            default 1e-4 in float32 and 1 in other types.
        on_finding: called with each finding as it comes.

    Raises:
        ValueError: no prompt is given.

    Example:

    ```python
    report = examine("Qwen/Qwen3-0.6B", tools=[search, calculator])
    assert report.passed, report.as_dict()
    ```
    """
    if not prompts:
        raise ValueError("`prompts` must hold at least one, got none.")
    subject = SubjectState(
        source=model,
        given_tokenizer=tokenizer,
        tool_source=tools,
        prompts=[[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts],
        parser=parser,
    )
    report = Report(on_finding=on_finding)
    report.run(TEMPLATE_CHECKS, subject)
    if engines is None or engines:
        learner = LearnerState(subject=subject, dtype=dtype, given_tolerance=tolerance)
        report.run(MODEL_CHECKS, learner)
        for engine in _installed(report) if engines is None else engines:
            with ExitStack() as stack:
                state = EngineState(learner=learner, given=engine, stack=stack)
                name = engine if isinstance(engine, str) else type(engine).__name__
                report.run(ENGINE_CHECKS, state, suffix=f" ({name})")
    return report


def _installed(report: Report) -> list[str]:
    if importlib.util.find_spec("vllm") is not None:
        return ["torch", "vllm"]
    evidence = "vLLM is not installed; only the torch engine is checked."
    report.add(Finding(status="skipped", evidence=evidence, name="engine (vllm)"))
    return ["torch"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="path or id of a causal language model")
    parser.add_argument("--tools", help="Python file; every public function in it is a tool")
    parser.add_argument(
        "--prompt", action="append", help="what a user says; may be given several times"
    )
    parser.add_argument("--engine", choices=list(_ENGINES), default="both")
    parser.add_argument(
        "--no-engines", action="store_true", help="template checks alone; no weights are read"
    )
    parser.add_argument("--parser", help="what reads calls: hermes, a family, or one of vLLM's")
    parser.add_argument("--dtype", choices=list(_DTYPES), default="float32", help="of the weights")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="nats between engine and learner at the worst token "
        f"(default: {TOLERANCE[torch.float32]:g} in float32, {TOLERANCE_HALF:g} in bfloat16)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 if one of them is a failure."""
    transformers_logging.disable_progress_bar()
    progress = Console(file=sys.stderr)
    with progress.status("checking ...") as status:
        report = examine(
            args.model,
            tools=args.tools or (get_weather,),
            prompts=args.prompt or DEFAULT_PROMPTS,
            engines=[] if args.no_engines else _ENGINES[args.engine],
            parser=args.parser,
            dtype=_DTYPES[args.dtype],
            tolerance=args.tolerance,
            on_finding=lambda finding: status.update(f"{finding.name}: {finding.status}"),
        )
    if args.json:
        print(json.dumps(report.as_dict(), ensure_ascii=False, indent=2))
    else:
        Console().print(as_table(report, args.model))
    return 0 if report.passed else 1


def as_table(report: Report, title: str) -> Table:
    table = Table("check", "", title=Text(title), box=box.SIMPLE_HEAD)
    table.add_column("what was seen", overflow="fold")
    for finding in report.findings:
        colour = _COLOURS[finding.status]
        text = Text(finding.evidence)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style=colour)
        table.add_row(Text(finding.name), Text(finding.status, style=colour), text)
    return table
