"""Measure B9, B10 and B15: the loop's own time and memory, with an engine that answers at once."""

import gc
import os
import statistics
import threading
from collections import Counter
from collections.abc import Callable
from random import Random

from agent_vllm import Completion, Limits, rollout_batch
from agent_vllm.engines.base import GenerationRequest
from agent_vllm.testing import ScriptedRolloutEngine
from benchmarks.figures import Figure, at_most, cpu_seconds_of, in_turns, ratios
from benchmarks.work import LIMITS, NUM_TOOL_TURNS, TEXT, Setup, conversations, lookup, setup


def host_time(quick: bool) -> list[Figure]:
    """Measure B9: milliseconds of host time per turn, and how they grow with the trajectories."""
    sizes = (8, 16) if quick else (64, 512, 4096)
    ours = setup()
    rollouts(ours, sizes[-1])  # the script is written now, which is no part of the loop
    gc.collect()
    gc.freeze()  # as vLLM does when it has started: the collector leaves out what was imported
    repeats = {size: max(sizes[-1] // (8 * size), 1) for size in sizes}  # a few ms say little
    seconds = in_turns(
        {
            str(size): lambda size=size: [rollouts(ours, size) for _ in range(repeats[size])]
            for size in sizes
        },
        1 if quick else 3,
        cpu_seconds_without_garbage,
    )
    num_turns = {str(n): repeats[n] * n * (NUM_TOOL_TURNS + 1) for n in sizes}
    per_turn = {name: [1000 * s / num_turns[name] for s in seconds[name]] for name in seconds}
    smallest, *_, largest = per_turn
    note = ", ".join(f"{n}: {statistics.median(ms):.3f} ms" for n, ms in per_turn.items())
    worst = max(per_turn.values(), key=statistics.median)
    return [
        Figure(
            id="B9 turn", what="host time of our loop a turn, scripted engine, with a tool call",
            goal=at_most(1.0), values=worst, unit="ms", note=note,
        ),
        Figure(
            id="B9 growth", what=f"host time a turn, {largest} / {smallest} trajectories",
            goal=at_most(1.15), values=ratios(per_turn[largest], per_turn[smallest]),
        ),
    ]  # fmt: skip


def cpu_seconds_without_garbage(work: Callable[[], object]) -> float:
    gc.collect()  # what the other side left
    return cpu_seconds_of(work)


def rollouts(ours: Setup, num_tasks: int) -> None:
    num_turns: Counter[str | None] = Counter()  # to look at the ids would take as long as a turn

    def script(request: GenerationRequest) -> list[int]:
        row = str(request.affinity).partition("row ")[2].partition(",")[0]
        num_turns[request.affinity] += 1
        return ours.script.turn(row, num_turns[request.affinity] - 1)

    engine = ScriptedRolloutEngine(ours.tokenizer, script)
    tasks = conversations(num_tasks)
    rollout_batch(engine, ours.chat, tasks, [[lookup]] * num_tasks, limits=LIMITS)


def long_agents(quick: bool) -> list[Figure]:
    """Measure B15: host time per turn of agents with many turns and long tool results."""
    sizes = (5, 10) if quick else (25, 200)
    ours = setup()
    words = ours.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    page = str(ours.tokenizer.decode((words * (1 + 2100 // len(words)))[:2100]))
    long_rollouts(ours, page, 2)
    seconds = in_turns(
        {str(size): lambda size=size: long_rollouts(ours, page, size) for size in sizes},
        1 if quick else 3,
        cpu_seconds_without_garbage,
    )
    per_turn = {n: [1000 * s / (4 * int(n)) for s in seconds[n]] for n in seconds}
    short, long = per_turn
    note = ", ".join(f"{n}: {statistics.median(ms):.2f} ms" for n, ms in per_turn.items())
    return [
        Figure(
            id="B15", what=f"host time per turn, trajectories of {long} / {short} turns",
            goal=at_most(1.5), values=ratios(per_turn[long], per_turn[short]), note=note,
        )
    ]  # fmt: skip


class KeepsNothing(ScriptedRolloutEngine):
    """Let go of each request, as a real engine does; 800 prompts of 200,000 ids are 1.4 GB."""

    async def _sample(self, request: GenerationRequest) -> Completion:
        completion = await super()._sample(request)
        self.requests.clear()
        return completion


def long_rollouts(ours: Setup, page: str, num_turns: int) -> None:
    """Roll 4 trajectories out whose every turn reads the page."""

    def read() -> str:
        """Reads a page."""
        return page

    call = '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
    engine = KeepsNothing(ours.tokenizer, [call], max_model_len=2**20)
    tasks = conversations(4)
    limits = Limits(max_turns=num_turns)
    rollout_batch(engine, ours.chat, tasks, [[read]] * 4, limits=limits)


class LongTurns(ScriptedRolloutEngine):
    """Sample a call behind many words in every turn, as fresh objects like a real engine's."""

    num_tokens: int

    async def _sample(self, request: GenerationRequest) -> Completion:
        random = Random(request.seed)
        call = self.encode_turn(
            '<tool_call>\n{"name": "wait", "arguments": {"key": "a"}}\n</tool_call>'
        )
        num_words = self.num_tokens - len(request.prompt_ids) - len(call)
        ids = [int(str(300 + random.getrandbits(8))) for _ in range(num_words)]
        logprobs = [-random.random() for _ in range(num_words + len(call))]
        return Completion(
            token_ids=ids + call, logprobs=logprobs, finish_reason="stop",
            policy_version=self.policy_version,
        )  # fmt: skip


def memory(quick: bool) -> list[Figure]:
    """Measure B10: resident memory per token of live trajectories, all waiting in a tool."""
    num_tasks, num_tokens = (8, 500) if quick else (4096, 2000)
    ours = setup()
    engine = LongTurns(ours.tokenizer, ours.script)
    engine.num_tokens = num_tokens
    counted = threading.Lock()
    resident: list[int] = []
    remaining = [num_tasks]

    async def wait(key: str) -> str:
        """Waits.

        Args:
            key: The key.
        """
        with counted:
            remaining[0] -= 1
            if remaining[0] == 0:
                resident.append(resident_bytes())
        return ""

    rollouts(ours, 8)
    before = resident_bytes()
    limits = Limits(max_turns=1)
    tasks = conversations(num_tasks)
    trajectories = rollout_batch(engine, ours.chat, tasks, [[wait]] * num_tasks, limits=limits)
    total = sum(len(t.prompt_ids) + len(t.completion_ids) for t in trajectories)
    return [
        Figure(
            id="B10", what=f"host memory of {num_tasks} live trajectories of {num_tokens} tokens",
            goal=at_most(64), values=[(resident[0] - before) / total], unit="bytes per token",
        )
    ]  # fmt: skip


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
