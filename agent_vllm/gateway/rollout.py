"""Roll out agents that have a loop of their own: one run per trajectory, each with its own key.

Invariant: every trajectory that was asked for is returned, in order, whatever its agent does.
"""

from collections.abc import Sequence

from agent_vllm.blocking import run_blocking
from agent_vllm.chat import ChatFormat
from agent_vllm.engines.base import RolloutEngine
from agent_vllm.gateway.agent import Agent, AgentFailed, Endpoint, Row, check_agent, run_agent
from agent_vllm.gateway.server import MODEL, Gateway
from agent_vllm.gateway.session import Session
from agent_vllm.rollout import (
    RolloutContext,
    RolloutStatus,
    TurnSampler,
    check_options,
    run_all,
    turn_samplers,
)
from agent_vllm.settings import Limits, SamplingParams
from agent_vllm.tools import ToolRunner
from agent_vllm.types import StopReason, Trajectory


def rollout_agent(
    engine: RolloutEngine,
    chat: ChatFormat,
    agent: Agent,
    rows: Sequence[Row],
    num_generations: int = 1,
    *,
    limits: Limits | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop_strings: Sequence[str] = (),
    thinking_ratio: float | None = None,
    seed: int | None = None,
    status: RolloutStatus | None = None,
) -> list[Trajectory]:
    """Run `rollout_agent_async` from code that is not async: a script, a thread, a notebook."""
    rollout = rollout_agent_async(
        engine,
        chat,
        agent,
        rows,
        num_generations,
        limits=limits,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop_strings=stop_strings,
        thinking_ratio=thinking_ratio,
        seed=seed,
        status=status,
    )
    return run_blocking(rollout)


async def rollout_agent_async(
    engine: RolloutEngine,
    chat: ChatFormat,
    agent: Agent,
    rows: Sequence[Row],
    num_generations: int = 1,
    *,
    limits: Limits | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop_strings: Sequence[str] = (),
    thinking_ratio: float | None = None,
    seed: int | None = None,
    status: RolloutStatus | None = None,
) -> list[Trajectory]:
    """Run an agent G times on each of B rows; each run's requests become its trajectory.

    Args:
        agent: a function of a row and an OpenAI client, or a command; see `Agent`. It asks for the
            model `"policy"`.
        rows: what each run is about; the agent gets it as it is.
        num_generations: G.
        limits: of each trajectory; `Limits()` by default. `max_invalid_calls` and `tool_timeout_s`
            must be left out, since the agent runs the tools. `deadline_s` bounds the whole run.
        temperature, top_p, top_k, min_p, stop_strings, thinking_ratio, seed, status: as in
            `rollout_batch_async`.

    Returns:
        B*G trajectories, row-major. Each is the conversation that was answered last; what was
        sampled in other ones is in `branches`, and what the agent returned or printed in `output`.

    Raises:
        ValueError: a limit can't be held, or a sampling value is out of range.
        TypeError: `agent` is neither a function nor a command.
    """
    sampling = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop_strings=stop_strings
    )
    limits = limits or Limits()
    check_agent(agent)
    check_agent_limits(limits)
    check_options(num_generations, thinking_ratio)
    context = RolloutContext(
        engine=engine,
        sampling=sampling,
        limits=limits,
        runner=ToolRunner(),
        status=status or RolloutStatus(),
    )
    context.status.num_trajectories += len(rows) * num_generations
    seed = engine.next_seed() if seed is None else seed
    options = (num_generations, thinking_ratio, seed)
    samplers = turn_samplers(context, chat, len(rows), *options)
    async with Gateway() as gateway:
        return await run_all(
            _run(gateway, agent, row, sampler)
            for row, of_row in zip(rows, samplers, strict=True)
            for sampler in of_row
        )


async def _run(gateway: Gateway, agent: Agent, row: Row, sampler: TurnSampler) -> Trajectory:
    """Return one run's trajectory, whatever ended it."""
    context, session, output = sampler.context, Session(sampler), None
    try:
        async with gateway.serve(session) as key:
            endpoint = Endpoint(base_url=gateway.base_url, api_key=key, model=MODEL)
            output = await run_agent(agent, row, endpoint, context.time_left_s())
    except AgentFailed as failed:
        session.end(StopReason.AGENT_ERROR, str(failed))
    except TimeoutError:
        session.end(StopReason.DEADLINE)
    context.status.num_finished += 1
    return session.trajectory(output)


def check_agent_limits(limits: Limits) -> None:
    """Refuse limits of what the agent does by itself.

    Raises:
        ValueError: names the limit.
    """
    for name in ("max_invalid_calls", "tool_timeout_s"):
        value = getattr(limits, name)
        if value is not None:
            raise ValueError(
                f"`{name}` must be left out with an agent, got {value}: the agent runs its tools "
                "by itself. Let `deadline_s` bound its run."
            )
