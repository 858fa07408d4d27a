"""`make soak`: many trajectories, much trouble, nothing lost, nothing left behind.

PYTHONPATH=tests:examples python -m stress.soak --engine scripted --num-trajectories 20000
PYTHONPATH=tests:examples python -m stress.soak --engine vllm --num-trajectories 500

A seed chooses the trajectories that meet a fault, and which. Fails if a trajectory is lost, mixed
up with another or ended for another reason than its faults give; if a batch outlasts its deadline;
or if threads, processes, open files or memory grow.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# oneDNN keeps code for each of the last 1024 shapes, a third of a megabyte each: memory would grow
# through the whole soak and tell nothing.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")

import argparse
import contextlib
import gc
import json
import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from tiny_tasks import SMALL_KINDS, calculator, get_price, make_tasks

from agent_vllm import ChatFormat, Limits, RolloutEngine, StopReason, Trajectory, rollout_batch
from agent_vllm.engines.base import GenerationRequest
from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.tools import Tool, as_tool, shared_loop
from agent_vllm.types import ToolResult
from benchmarks.work import load_model
from stress.faults import FaultyEngine
from stress.trouble import (
    IN_ENGINE,
    IN_USER,
    KINDS,
    SLEEP_S,
    give_back,
    mark,
    trouble_in,
    user_of,
)

TROUBLE_SHARE = 0.4  # of the trajectories
ENGINE_SHARE = 0.01  # of the requests, for each kind
USER_SHARE = 0.5
DEADLINE_S = 120.0
SLOW_S = 1.0  # an engine's late answer
LIMITS = Limits(
    max_turns=6,
    max_completion_tokens=600,
    max_tool_result_tokens=60,
    tool_timeout_s=4.0,
    deadline_s=DEADLINE_S,
)
SETTLE_S = 30.0
NUM_WARM_UPS = 5  # threads, workers and their memory: as many as will ever be at work at a time


# ---- what is run ----


@dataclass(frozen=True, kw_only=True)
class Case:
    """One trajectory to be: its number marks all that is its own."""

    number: int
    kind: str | None  # of its trouble
    question: str
    tools: list[Tool]
    has_user: bool
    reasons: frozenset[StopReason]  # how it may end

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]


def case(
    number: int,
    seed: int,
    question: str,
    tools: Sequence[Callable[..., str]],
    reasons: Iterable[StopReason],
) -> Case:
    choice = Random(f"{seed}/{number}")
    in_trouble = choice.random() < TROUBLE_SHARE
    kind = choice.choices([*KINDS], [*KINDS.values()])[0] if in_trouble else None
    own = {StopReason.USER_ERROR} if kind in IN_USER else reasons
    return Case(
        number=number,
        kind=kind,
        question=question,
        tools=[replace(as_tool(t), function=trouble_in(kind, number, t)) for t in tools],
        has_user=kind in IN_USER or choice.random() < USER_SHARE,
        reasons=frozenset({*own, StopReason.ENGINE_ERROR, StopReason.DEADLINE}),
    )


def work(task: int) -> str:
    """
    Work on a task.

    Args:
        task: its number
    """
    return f"did {task}"


def scripted_cases(numbers: Sequence[int], seed: int) -> list[Case]:
    ends = [StopReason.ANSWERED]
    return [case(n, seed, f"Do task {mark(n)}.", [work], ends) for n in numbers]


def agent_cases(numbers: Sequence[int], seed: int) -> list[Case]:
    """Questions that make the tiny agent call its tools; what it calls is its own choice."""
    tasks = make_tasks("train", len(numbers), seed=numbers[0], kinds=SMALL_KINDS)
    questions = [task["prompt"][0]["content"] for task in tasks]
    tools = [calculator, get_price]
    return [case(n, seed, q, tools, StopReason) for n, q in zip(numbers, questions, strict=True)]


def script(tokenizer: Any, chat: ChatFormat) -> Callable[[GenerationRequest], list[int]]:
    """Call, answer; call again when the user asks again. The prompt alone tells the turn."""
    end = chat.end_token_ids[0]
    prompt = chat.prompt_ids([{"role": "user", "content": "x"}], [as_tool(work)])

    def turn(request: GenerationRequest) -> list[int]:
        number = int(re.findall(r"#(\d+)#", tokenizer.decode(request.prompt_ids))[0])
        num_turns = (request.prompt_ids.count(end) - prompt.count(end)) // 2
        call = json.dumps({"name": "work", "arguments": {"task": number}})
        text = f"It is {mark(number)}." if num_turns % 2 else f"<tool_call>\n{call}\n</tool_call>"
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], end]

    return turn


# ---- what must hold of a trajectory ----


def problems(case: Case, t: Trajectory, text_of: Callable[[list[int]], str]) -> list[str]:
    """Return what is wrong with it; empty where it is whole, its own, and ended as it should."""
    found = []
    if t.messages[:1] != case.messages or case.question not in text_of(t.prompt_ids):
        found.append("has another prompt")
    others = [r.content for r in t.tool_results] + [m["content"] for m in t.messages]
    marks = {int(n) for text in others for n in re.findall(r"#(\d+)#", text)}
    if marks - {case.number}:
        found.append(f"bears the marks {sorted(marks)}")
    lists = (t.completion_ids, t.completion_mask, t.logprobs)
    if len({len(values) for values in lists}) != 1 or not all(map(math.isfinite, t.logprobs)):
        found.append("has lists of different lengths, or a logprob that is no number")
    if case.kind is None and any(map(is_unexplained, t.tool_results)):
        found.append("has a failed call, but no fault")
    if not case.has_user and t.stop_reason is StopReason.USER_ERROR:
        found.append("has a user's error, but no user")
    if t.stop_reason not in case.reasons:
        found.append(f"ended as {t.stop_reason}")
    return found


def is_late(result: ToolResult) -> bool:
    """On a busy machine a call can be late without a fault; how many were is printed."""
    return result.status == "failed" and "Timed out after" in result.content


def is_unexplained(result: ToolResult) -> bool:
    """Neither late nor what a tool says of arguments that make no sense."""
    is_refusal = '"error": "ValueError: ' in result.content
    return result.status == "failed" and not is_late(result) and not is_refusal


# ---- what is held ----


@dataclass(frozen=True, kw_only=True)
class Held:
    """Count what this process holds of the machine, beside the pool of the shared event loop."""

    threads: int
    processes: int
    files: int
    memory_mb: int

    @classmethod
    def now(cls) -> "Held":
        shared_loop()  # lives as long as the program, with a bounded pool of idle threads
        give_back()
        gc.collect()
        lists = Path("/proc/self/task").glob("*/children")  # each thread has its own
        children = [child for path in lists for child in path.read_text().split()]
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            threads=sum(not t.name.startswith("asyncio_") for t in threading.enumerate()),
            processes=len(children),
            files=len(os.listdir("/proc/self/fd")),
            memory_mb=pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        )

    def grown_since(self, before: "Held") -> list[str]:
        allowed = replace(before, memory_mb=before.memory_mb * 11 // 10)  # a flood leaves some free
        names = ("threads", "processes", "files", "memory_mb")
        return [name for name in names if getattr(self, name) > getattr(allowed, name)]


def settled(before: Held) -> Held:
    """Return what is held once the threads that nobody waits for have ended."""
    give_up = time.monotonic() + SETTLE_S
    held = Held.now()
    while held.grown_since(before) and time.monotonic() < give_up:
        time.sleep(0.2)
        held = Held.now()
    return held


# ---- the soak ----


@dataclass(kw_only=True)
class Outcome:
    """Hold the results of a soak."""

    num_trajectories: int = 0
    reasons: Counter[StopReason] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    num_late: int = 0  # trajectories without a fault of which a call was late
    slowest_batch_s: float = 0.0
    before: Held | None = None
    after: Held | None = None

    def add(self, case: Case, t: Trajectory, found: list[str]) -> None:
        self.num_trajectories += 1
        self.reasons[t.stop_reason] += 1
        self.kinds.update([case.kind] if case.kind else [])
        self.num_late += case.kind is None and any(map(is_late, t.tool_results))
        self.problems += [f"trajectory {case.number} ({case.kind}) {text}" for text in found]


def soak(
    engine: FaultyEngine,
    make_cases: Callable[[Sequence[int], int], list[Case]],
    *,
    num_trajectories: int,
    batch_size: int,
    seed: int,
) -> Outcome:
    """Ctrl-C ends it early: what was done till then is judged."""
    chat = ChatFormat.from_tokenizer(engine.tokenizer)
    outcome = Outcome()
    for warm_up in range(NUM_WARM_UPS):
        roll(engine, chat, make_cases(range(batch_size), seed + warm_up), seed + warm_up)
    time.sleep(SLEEP_S)  # till what its last calls left is over
    outcome.before = Held.now()
    engine.met.clear()
    with contextlib.suppress(KeyboardInterrupt):
        while outcome.num_trajectories < num_trajectories:
            first = batch_size + outcome.num_trajectories
            last = min(first + batch_size, batch_size + num_trajectories)
            cases = make_cases(range(first, last), seed)
            start_s = time.monotonic()
            trajectories = roll(engine, chat, cases, seed + first)
            seconds = time.monotonic() - start_s
            for case, t in zip(cases, trajectories, strict=True):
                outcome.add(case, t, problems(case, t, engine.tokenizer.decode))
            outcome.slowest_batch_s = max(outcome.slowest_batch_s, seconds)
            done, held = outcome.num_trajectories, Held.now()
            print(f"  {done:6} trajectories, {seconds:5.1f} s, {held.memory_mb} MB", flush=True)
    outcome.after = settled(outcome.before)
    return outcome


def roll(
    engine: RolloutEngine, chat: ChatFormat, cases: Sequence[Case], seed: int
) -> list[Trajectory]:
    return rollout_batch(
        engine,
        chat,
        [case.messages for case in cases],
        [case.tools for case in cases],
        users_batch=[user_of(c.kind, c.number) if c.has_user else None for c in cases],
        limits=LIMITS,
        seed=seed,
    )


def failures(outcome: Outcome, num_trajectories: int) -> list[str]:
    """Return why the soak failed; empty where it did not."""
    assert outcome.before is not None and outcome.after is not None
    found = outcome.problems[:20]
    if num_trajectories != outcome.num_trajectories:
        found.append(f"{outcome.num_trajectories} of {num_trajectories} trajectories were run")
    if outcome.slowest_batch_s > DEADLINE_S + LIMITS.tool_timeout_s:
        found.append(f"a batch took {outcome.slowest_batch_s:.0f} s")
    return found + [f"{name} grew" for name in outcome.after.grown_since(outcome.before)]


def print_outcome(outcome: Outcome, engine: FaultyEngine) -> None:
    faults = {**outcome.kinds, **{f"engine: {f}": n for f, n in engine.met.items()}}
    print(f"{outcome.num_trajectories} trajectories, {len(faults)} kinds of fault: {faults}")
    print(f"ended: {dict(outcome.reasons.most_common())}")
    print(f"late without a fault: {outcome.num_late}")
    print(f"slowest batch {outcome.slowest_batch_s:.1f} s, its deadline {DEADLINE_S:g} s")
    print(f"before: {outcome.before}\nafter:  {outcome.after}")


def faulty_engine(engine: RolloutEngine, seed: int) -> FaultyEngine:
    return FaultyEngine(engine, dict.fromkeys(IN_ENGINE, ENGINE_SHARE), hang_s=SLOW_S, seed=seed)


def scripted_engine() -> ScriptedRolloutEngine:
    _, tokenizer = load_model("tiny")
    chat = ChatFormat.from_tokenizer(tokenizer)
    engine = ScriptedRolloutEngine(tokenizer, script(tokenizer, chat))
    engine.requests = _Forgotten()
    return engine


class _Forgotten(list[Any]):
    """Keeps no request: the soak's own list would be the memory that grows."""

    def append(self, _: Any) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stress.soak", description=__doc__)
    parser.add_argument("--engine", choices=["scripted", "vllm"], default="scripted")
    parser.add_argument("--num-trajectories", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    is_scripted = arguments.engine == "scripted"
    if is_scripted:
        inner: RolloutEngine = scripted_engine()
    else:
        from agent_vllm import VLLMRolloutEngine

        # A cache that the warm-up fills: a larger one takes memory page by page, as it is used.
        inner = VLLMRolloutEngine(*load_model("tiny"), kv_cache_memory_bytes=64 << 20)
    with faulty_engine(inner, arguments.seed) as engine:
        outcome = soak(
            engine,
            scripted_cases if is_scripted else agent_cases,
            num_trajectories=arguments.num_trajectories,
            batch_size=arguments.batch_size,
            seed=arguments.seed,
        )
        print_outcome(outcome, engine)
    wrong = failures(outcome, arguments.num_trajectories)
    for line in wrong:
        print(f"FAILED: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
