"""Check a model, its chat template, your tools and the engines before a training run.

The checks look for faults that training would not report: a chat template that rewrites earlier
turns, end tokens that are not trained, masks that are shifted, calls that are not read, and engines
whose logprobs or weights differ from the learner's. Your tools are described to the model, but
never run. The exit status is 1 if a check fails.
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
    EngineState,
    LearnerState,
)
from agent_vllm.inspect.doctor.findings import Finding, Report
from agent_vllm.inspect.doctor.subject import SubjectState, Tools
from agent_vllm.inspect.doctor.template_checks import TEMPLATE_CHECKS
from agent_vllm.types import Messages

DESCRIPTION = __doc__ or ""
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
    """Check a model for multi-turn rollouts. A fault of the model is a finding, not an error.

    Args:
        model: a causal language model (only read), or a path or id to load one from.
        tokenizer: the model's tokenizer; by default loaded from the same path.
        tools: functions or `Tool` objects, or the path of a Python file that defines them. They are
            never run.
        prompts: user texts or conversations, at least one.
        engines: names, or engines that were built from this model; those stay open and keep its
            weights. By default torch, and vLLM if it is installed. An empty list runs the template
            checks only, which need no weights.
        parser: as in `ChatFormat.from_tokenizer`.
        dtype: dtype in which the model is loaded, if it is loaded here.
        tolerance: largest allowed difference between the engine's and the learner's logprobs, in
            nats per token. By default what rounding explains: 1e-3 in float32 (0.02 on CUDA, where
            vLLM multiplies in TF32), with a mean of 1e-4; 2 in other dtypes, with a mean of 0.1.
        on_finding: called with each finding when it is known.

    Returns:
        The findings, one per check.

    Raises:
        ValueError: no prompt was given.

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
    if engines is not None and not engines:
        return report
    learner = LearnerState(subject=subject, dtype=dtype, given_tolerance=tolerance)
    report.run(MODEL_CHECKS, learner)
    for engine in _installed(report) if engines is None else engines:
        _run_engine_checks(report, learner, engine)
    return report


def _run_engine_checks(report: Report, learner: LearnerState, engine: str | RolloutEngine) -> None:
    name = engine if isinstance(engine, str) else type(engine).__name__
    with ExitStack() as stack:
        state = EngineState(learner=learner, given=engine, stack=stack)
        report.run(ENGINE_CHECKS, state, suffix=f" ({name})")


def _installed(report: Report) -> list[str]:
    if importlib.util.find_spec("vllm") is not None:
        return ["torch", "vllm"]
    evidence = "vLLM is not installed; only the torch engine is checked."
    report.add(Finding(status="skipped", evidence=evidence, name="engine (vllm)"))
    return ["torch"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add("model", help="path or Hugging Face id of a causal language model")
    add("--tools", metavar="FILE", help="Python file; each public function in it is a tool")
    add("--prompt", action="append", help="a user message to sample from; can be repeated")
    add("--engine", choices=list(_ENGINES), default="both", help="engines to check (default: both)")
    add("--no-engines", action="store_true", help="run the template checks only; loads no weights")
    add("--parser", metavar="NAME", help="parser of tool calls: hermes, a family, or one of vLLM's")
    add(
        "--dtype",
        choices=list(_DTYPES),
        default="float32",
        help="dtype of the weights (default: float32)",
    )
    add(
        "--tolerance",
        type=float,
        metavar="NATS",
        help="largest allowed logprob difference between engine and learner, per token "
        "(default: what rounding explains in the dtype)",
    )
    add("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if a check failed."""
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
    """Lay the findings out as a table, one row per check."""
    table = Table("check", "", title=Text(title), box=box.SIMPLE_HEAD)
    table.add_column("what was seen", overflow="fold")
    for finding in report.findings:
        colour = _COLOURS[finding.status]
        text = Text(finding.evidence)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style=colour)
        table.add_row(Text(finding.name), Text(finding.status, style=colour), text)
    return table
