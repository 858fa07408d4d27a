"""Measure B1, B3, B6 and B13: rollouts with tools against a bound, a barrier and a plain loop."""

import asyncio
from typing import Any

import torch

from agent_vllm import RolloutEngine, VLLMRolloutEngine, rollout_batch, rollout_single
from agent_vllm.blocking import run_blocking
from agent_vllm.tools import ToolRunner, tools_by_name
from agent_vllm.training import gather_logprobs
from benchmarks.figures import SHOWN, Figure, at_least, at_most, in_turns, medians, ratios
from benchmarks.work import (
    LIMITS,
    NUM_TOOL_TURNS,
    TOOL,
    ScriptedTorchEngine,
    Setup,
    conversations,
    lookup,
    setup,
)


def against_bound(quick: bool) -> list[Figure]:
    """Measure B1: 64 trajectories of 3 tool turns against a bound that no schedule can beat."""
    num_tasks = 4 if quick else 64
    ours = setup()
    TOOL.latency = "log-normal"
    slowest = max(range(num_tasks), key=ours.script.seconds_alone)
    with ours.vllm() as engine:
        run_all(engine, ours, num_tasks, "none")
        seconds = in_turns(
            {
                "ours": lambda: run_all(engine, ours, num_tasks, "log-normal"),
                "without latency": lambda: run_all(engine, ours, num_tasks, "none"),
                "slowest alone": lambda: run_all(engine, ours, num_tasks, "log-normal", slowest),
            },
            1 if quick else 3,
        )
    bound = [
        max(pair) for pair in zip(seconds["without latency"], seconds["slowest alone"], strict=True)
    ]
    return [
        Figure(
            id="B1", what=f"{num_tasks} trajectories x {NUM_TOOL_TURNS} tool turns: wall / bound",
            goal=at_most(1.15), values=ratios(seconds["ours"], bound), note=medians(seconds),
        )
    ]  # fmt: skip


def against_barrier(quick: bool) -> list[Figure]:
    """Measure B3: the same rollout in a loop with a barrier between turns."""
    num_tasks = 4 if quick else 64
    ours = setup()
    with ours.vllm() as engine:
        run_all(engine, ours, num_tasks, "none")
        seconds = in_turns(
            {
                "ours": lambda: run_all(engine, ours, num_tasks, "log-normal"),
                "barrier": lambda: barrier_loop(engine, ours, num_tasks, "log-normal"),
            },
            1 if quick else 3,
        )
    return [
        Figure(
            id="B3", what="the same by a barrier loop a turn, our engine: barrier / ours",
            goal=at_least(1.4), values=ratios(seconds["barrier"], seconds["ours"]),
            note=medians(seconds),
        )
    ]  # fmt: skip


def against_seed(quick: bool) -> list[Figure]:
    """Measure B6: one trajectory after another, with `generate` and on our torch engine."""
    num_tasks = 2 if quick else 16
    ours = setup()
    torch_engine = ScriptedTorchEngine(ours.model, ours.tokenizer)
    torch_engine.script = ours.script
    TOOL.latency = "0.1"
    slowest = max(range(num_tasks), key=ours.script.seconds_alone)
    with ours.vllm() as engine, torch_engine:
        run_all(engine, ours, num_tasks, "none")
        seconds = in_turns(
            {
                "ours": lambda: run_all(engine, ours, num_tasks, "0.1"),
                "generate": lambda: generate_loop(ours, num_tasks, "0.1"),
                "torch engine": lambda: one_after_another(torch_engine, ours, num_tasks, "0.1"),
                "slowest alone": lambda: run_all(engine, ours, num_tasks, "0.1", slowest),
            },
            1 if quick else 2,
        )
    return [
        Figure(
            id="B6", what=f"{num_tasks} trajectories one after another by generate / ours",
            goal=at_least(20), values=ratios(seconds["generate"], seconds["ours"]),
            note=medians(seconds),
        ),
        Figure(
            id="B6 torch engine", what="the same loop on our torch engine / ours",
            goal=SHOWN, values=ratios(seconds["torch engine"], seconds["ours"]),
        ),
        Figure(
            id="B6 bound", what="one after another by generate / the slowest alone by ours",
            goal=SHOWN, values=ratios(seconds["generate"], seconds["slowest alone"]),
        ),
    ]  # fmt: skip


def prefix_cache(quick: bool) -> list[Figure]:
    """Measure B13: prefilled tokens against new tokens, over all turns."""
    num_tasks = 4 if quick else 64
    ours = setup()
    TOOL.num_words = 150
    with ours.vllm() as engine:
        cached = watch_cached_tokens(engine)
        trajectories = rollout_all(engine, ours, num_tasks, "none")
    num_prompt, num_new = 0, 0
    for trajectory in trajectories:
        length, num_known = len(trajectory.prompt_ids), 0
        for segment in trajectory.segments:
            if segment.is_sampled:
                num_prompt, num_new = num_prompt + length, num_new + length - num_known
            length += len(segment.token_ids)
            if segment.is_sampled:
                num_known = length - 1  # nothing has been computed after the last token
    num_prefilled = num_prompt - sum(cached)
    return [
        Figure(
            id="B13", what="tokens prefilled / tokens that are new, blocks of 32",
            goal=at_most(1.25), values=[num_prefilled / num_new],
            note=f"{num_prompt} in prompts, {num_new} new, {num_prefilled} prefilled",
        )
    ]  # fmt: skip


def watch_cached_tokens(engine: VLLMRolloutEngine) -> list[int]:
    """Return a list that collects each finished request's prefix-cache hits, in tokens."""
    cached: list[int] = []
    llm = engine._stepper._llm
    step = llm.step

    def watched() -> list[Any]:
        outputs = step()
        cached.extend(output.num_cached_tokens or 0 for output in outputs if output.finished)
        return outputs

    llm.step = watched
    return cached


# ---- the loops ----


def run_all(
    engine: RolloutEngine, ours: Setup, num_tasks: int, latency: str, only: int | None = None
) -> None:
    reset_prefix_cache(engine)
    rollout_all(engine, ours, num_tasks, latency, only)


def rollout_all(
    engine: RolloutEngine, ours: Setup, num_tasks: int, latency: str, only: int | None = None
) -> list[Any]:
    """Roll out all tasks, or one of them, with our engine."""
    TOOL.latency = latency
    tasks = conversations(num_tasks)
    tasks = tasks if only is None else [tasks[only]]
    return rollout_batch(engine, ours.chat, tasks, [[lookup]] * len(tasks), limits=LIMITS)


def one_after_another(engine: RolloutEngine, ours: Setup, num_tasks: int, latency: str) -> None:
    TOOL.latency = latency
    for task in conversations(num_tasks):
        rollout_single(engine, ours.chat, task, [lookup], limits=LIMITS)


def generate_loop(ours: Setup, num_tasks: int, latency: str) -> None:
    """Run the plain loop: every turn renders and encodes the whole conversation, `generate` samples
    one row, a forward pass gives its logprobs, and tools run in sequence."""
    TOOL.latency = latency
    tools = list(tools_by_name([lookup]).values())
    for task in conversations(num_tasks):
        messages: list[dict[str, Any]] = list(task)
        calls = [True]
        while calls:
            prompt_ids = ours.chat.prompt_ids(messages, tools)
            turn = ours.script.turn_after(prompt_ids)
            sample_tokens(ours, prompt_ids, len(turn))
            parsed = ours.chat.parse(turn, prompt_ids, tools)
            messages.append(parsed.message)
            calls = parsed.calls
            for call in calls:
                content = lookup(**(call.arguments or {}))
                messages.append({"role": "tool", "name": call.name, "content": content})


def sample_tokens(ours: Setup, prompt_ids: list[int], num_tokens: int) -> None:
    ids = torch.tensor([prompt_ids])
    sampled = ours.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
    )
    with torch.no_grad():
        logits = ours.model(sampled, logits_to_keep=num_tokens + 1).logits[:, :-1]
    gather_logprobs(logits, sampled[:, -num_tokens:])


def barrier_loop(engine: RolloutEngine, ours: Setup, num_tasks: int, latency: str) -> None:
    reset_prefix_cache(engine)
    TOOL.latency = latency
    run_blocking(_barrier_loop(engine, ours, num_tasks))


async def _barrier_loop(engine: RolloutEngine, ours: Setup, num_tasks: int) -> None:
    """Generate all turns and wait, then run all tools in parallel and wait."""
    named = tools_by_name([lookup])
    tools, runner = list(named.values()), ToolRunner()
    rows = [ours.chat.prompt_ids(task, tools) for task in conversations(num_tasks)]
    for turn in range(NUM_TOOL_TURNS + 1):
        completions = await asyncio.gather(
            *(engine.generate(list(ids), max_new_tokens=512) for ids in rows)
        )
        for ids, completion in zip(rows, completions, strict=True):
            ids += completion.token_ids
        if turn == NUM_TOOL_TURNS:
            break
        parsed = [ours.chat.parse(completion.token_ids) for completion in completions]
        results = await asyncio.gather(*(runner.run(p.calls, named) for p in parsed))
        for ids, result in zip(rows, results, strict=True):
            ids += ours.chat.suffix_ids(result, tools, last_token_id=ids[-1])


def reset_prefix_cache(engine: RolloutEngine) -> None:
    """Empty the prefix cache, as a weight sync does, so that rounds cost the same."""
    if isinstance(engine, VLLMRolloutEngine):
        assert engine._driver.call(engine._stepper._llm.reset_prefix_cache)
