"""Check a model and the engines that sample with its weights.

Samples go through `rollout_batch` and `collate` as in training. So that there are several turns,
every turn that ends counts as a call, and a stand-in returns its result. Invariant: the learner's
weights are only read. Changes are made to a copy, and an engine ends with the weights it began
with.

Legend: B rows, T tokens.
"""

import copy
import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agent_vllm.chat import SampledTurn, num_common
from agent_vllm.engines import RolloutEngine, create_rollout_engine
from agent_vllm.engines.learner import gap_bound, vocabulary_size
from agent_vllm.engines.models import context_length, evaluating, pad_token_id
from agent_vllm.inspect.doctor.findings import Check, Finding, show_ids
from agent_vllm.inspect.doctor.subject import SubjectState
from agent_vllm.inspect.doctor.template_checks import TEMPLATE
from agent_vllm.rollout import rollout_batch
from agent_vllm.settings import Limits
from agent_vllm.training import (
    GapBound,
    LogprobGap,
    TrainingBatch,
    collate,
    logprob_gap,
    predicted_logprobs,
)
from agent_vllm.types import ParsedTurn, Trajectory

NUM_GENERATIONS = 4
TEMPERATURE = 0.8  # not 1: logprobs of another distribution than the one sampled from would show
_LIMITS = Limits(max_turns=3, max_new_tokens=32)
_TURN_ENDS = (".", ",", "?", "!", ":", "\n")
_CONTEXT = 4096  # tokens at most that engines make room for
_SEED = 0
_NUDGE = 0.05  # of a tensor's mean size
_SURE = 1e-3  # chance of equal samples below which they are no accident


@dataclass(kw_only=True)
class LearnerState:
    """The model under examination; `given_tolerance` bounds its logprobs at every token."""

    subject: SubjectState
    dtype: torch.dtype
    given_tolerance: float | None
    model: PreTrainedModel = field(init=False)


@dataclass(kw_only=True)
class EngineState:
    """One engine, built from its name or given; an engine built here is closed with `stack`."""

    learner: LearnerState
    given: str | RolloutEngine
    stack: ExitStack
    engine: RolloutEngine = field(init=False)
    trajectories: list[Trajectory] = field(init=False)

    @property
    def model(self) -> PreTrainedModel:
        return self.learner.model

    @property
    def bound(self) -> GapBound:
        """The gap that passes."""
        usual = gap_bound(self.model.dtype, self.engine.dtype, device=self.model.device)
        worst = self.learner.given_tolerance
        return usual if worst is None else GapBound(mean=worst, worst=worst)

    def build(self, name: str, model: PreTrainedModel) -> RolloutEngine:
        options = {"max_model_len": min(context_length(model.config), _CONTEXT)}
        return create_rollout_engine(name, model, self.learner.subject.tokenizer, **options)

    def sample(self, engine: RolloutEngine | None = None) -> list[Trajectory]:
        """Sample G trajectories of each prompt in several turns, always with the same seed."""
        subject = self.learner.subject

        def always_a_call(turn: SampledTurn) -> ParsedTurn:
            return ParsedTurn(
                message={"role": "assistant", "content": turn.text}, calls=[subject.call]
            )

        return rollout_batch(
            engine or self.engine,
            replace(subject.chat, parser=always_a_call),
            subject.prompts,
            [subject.tools] * len(subject.prompts),
            num_generations=NUM_GENERATIONS,
            limits=_LIMITS,
            temperature=TEMPERATURE,
            stop_strings=_TURN_ENDS,
            seed=_SEED,
        )

    def collate(self, trajectories: list[Trajectory]) -> TrainingBatch:
        return collate(trajectories, pad_token_id(self.learner.subject.tokenizer))

    def gap(self, model: PreTrainedModel, trajectories: list[Trajectory]) -> LogprobGap:
        batch = self.collate(trajectories)
        learner = learner_logprobs(model, batch)
        return logprob_gap(batch.old_per_token_logps, learner, batch.completion_mask)


def learner_logprobs(model: PreTrainedModel, batch: TrainingBatch) -> torch.Tensor:
    """Return logprobs of a plain forward pass, row by row to save memory: `[B, T-1]` float32."""
    rows = []
    with evaluating(model):
        for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
            ids, mask = ids[None].to(model.device), mask[None].to(model.device)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            rows.append(predicted_logprobs(logits, ids, TEMPERATURE).cpu())
    return torch.cat(rows)


# ---- the model ----


def find_model(state: LearnerState) -> Finding:
    """Load the model and describe it."""
    source = state.subject.source
    checkpoint = ""
    if isinstance(source, str | Path):
        state.model = AutoModelForCausalLM.from_pretrained(source, dtype=state.dtype)
        if torch.cuda.is_available():
            state.model.to("cuda")  # type: ignore[arg-type]
        checkpoint = f" (the checkpoint's type is {AutoConfig.from_pretrained(source).dtype})"
    else:
        state.model = source
    model = state.model
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    head = "tied to the embedding" if _is_tied(model) else "apart from the embedding"
    return Finding(
        status="note",
        evidence=f"{type(model).__name__}, {num_parameters / 1e6:.1f} million parameters in "
        f"{model.dtype}{checkpoint}, head {head}, context of {context_length(model.config)} tokens "
        f"(the tokenizer says {state.subject.tokenizer.model_max_length}).",
    )


def _is_tied(model: PreTrainedModel) -> bool:
    return _weight(model.get_output_embeddings()) is _weight(model.get_input_embeddings())


def _weight(module: Any) -> torch.nn.Parameter:
    return module.weight


def find_vocabulary(state: LearnerState) -> Finding:
    """Check that every id of the tokenizer has an embedding."""
    size = vocabulary_size(state.model)
    vocabulary = state.subject.tokenizer.get_vocab()
    token, highest = max(vocabulary.items(), key=lambda item: item[1])
    if highest >= size:
        return Finding(
            status="fail",
            evidence=f"The tokenizer's highest id is {highest} ({token!r}), the embedding has "
            f"{size} rows.",
            remedy="`model.resize_token_embeddings(len(tokenizer))` before training.",
        )
    unused = size - highest - 1
    return Finding(
        status="note" if unused else "pass",
        evidence=f"{size} embeddings, highest id {highest}"
        + (f": {unused} ids have no token; sampled, they decode to nothing." if unused else "."),
    )


# ---- one engine ----


def find_engine(state: EngineState) -> Finding:
    """Build the engine, sync it and sample from it."""
    if isinstance(state.given, str):
        state.engine = state.stack.enter_context(state.build(state.given, state.model))
    else:
        state.engine = state.given
    state.engine.update_policy(state.model)
    state.trajectories = state.sample()
    if errors := [t.error for t in state.trajectories if t.error]:
        return Finding(
            status="fail",
            evidence=f"{len(errors)} of {len(state.trajectories)} trajectories failed: {errors[0]}",
            remedy="Try the torch engine; if it fails too, look at the model.",
        )
    num_tokens = sum(t.num_sampled_tokens for t in state.trajectories)
    num_turns = sum(t.num_turns for t in state.trajectories)
    return Finding(
        status="pass",
        evidence=f"{type(state.engine).__name__}: {len(state.trajectories)} trajectories, "
        f"{num_turns} turns, {num_tokens} sampled tokens.",
    )


def find_mask_and_shift(state: EngineState) -> Finding:
    """Check that column i of mask and logprobs belongs to the prediction of token i + 1."""
    batch = state.collate(state.trajectories)
    mask, old = batch.completion_mask, batch.old_per_token_logps
    for row, trajectory in enumerate(state.trajectories):
        wanted_mask, wanted_old = _columns(trajectory, mask.shape[1])
        wrong = (mask[row] != wanted_mask) | (old[row] != wanted_old)
        if wrong.any():
            column = int(wrong.nonzero()[0])
            return Finding(
                status="fail",
                evidence=f"Row {row}, column {column}: mask {int(mask[row, column])} and logprob "
                f"{old[row, column]:.4g} instead of {int(wanted_mask[column])} and "
                f"{wanted_old[column]:.4g} for {_around(state, trajectory, column + 1)}",
                remedy="Column i must belong to `input_ids[:, i + 1]`; `collate` does that.",
            )
    learner = learner_logprobs(state.model, batch)
    own, left, right = (
        logprob_gap(old, learner.roll(offset, 1), mask).max for offset in (0, -1, 1)
    )
    first = state.trajectories[0]
    evidence = (
        f"{int(mask.sum())} of {mask.numel()} columns are trained, each its own token's; the "
        f"learner's forward is {own:.1e} away there, {min(left, right):.2g} one column beside. "
        f"First trained: {_around(state, first, len(first.prompt_ids))}"
    )
    if own >= min(left, right):
        return Finding(
            status="fail", evidence=evidence, remedy="The engine's logprobs are not its tokens'."
        )
    return Finding(status="pass", evidence=evidence)


def _columns(trajectory: Trajectory, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute mask and logprobs from the segments, without `collate`: `[T - 1]` each."""
    mask, old = torch.zeros(num_columns, dtype=torch.long), torch.zeros(num_columns)
    position = len(trajectory.prompt_ids)
    for segment in trajectory.segments:
        for offset, logprob in enumerate(segment.logprobs or []):
            mask[position + offset - 1], old[position + offset - 1] = 1, logprob
        position += len(segment.token_ids)
    return mask, old


def _around(state: EngineState, trajectory: Trajectory, spot: int) -> str:
    ids = [*trajectory.prompt_ids, *trajectory.completion_ids]
    return show_ids(state.learner.subject.tokenizer, ids, spot)


def find_logprobs(state: EngineState) -> Finding:
    """Check that the engine's logprobs are the learner's, also in turns after a tool result."""
    gap = state.gap(state.model, state.trajectories)
    num_several = sum(t.num_turns > 1 for t in state.trajectories)
    evidence = (
        f"Apart by {gap} ({state.bound} are allowed in {state.model.dtype}) at temperature "
        f"{TEMPERATURE}; {num_several} of {len(state.trajectories)} trajectories have several "
        "turns."
    )
    if not state.bound.holds(gap):
        return Finding(
            status="fail",
            evidence=evidence,
            remedy="The engine samples from another distribution than the learner's: check its "
            'weights and type, or train with `old_logprobs="recomputed"`.',
        )
    return Finding(status="pass", evidence=evidence)


def find_samples(state: EngineState) -> Finding:
    """Check that the samples of a group differ, unless the model is certain of its output."""
    trajectories = state.trajectories
    groups = [
        trajectories[start : start + NUM_GENERATIONS]
        for start in range(0, len(trajectories), NUM_GENERATIONS)
    ]
    num_distinct = [len({tuple(t.completion_ids) for t in group}) for group in groups]
    evidence = f"{num_distinct} different ones in groups of {NUM_GENERATIONS}"
    if max(num_distinct) > 1:
        return Finding(status="pass", evidence=f"{evidence}.")
    repeats = [t for group in groups for t in group[1:]]
    chance = math.exp(sum(sum(t.logprobs) for t in repeats))
    evidence += f"; by their logprobs that has a chance of {chance:.1e}."
    if chance < _SURE:
        return Finding(
            status="fail",
            evidence=evidence,
            remedy="Give every request its own seed, and check that sampling isn't greedy.",
        )
    return Finding(
        status="note",
        evidence=evidence,
        remedy="The model is sure of itself: GRPO learns nothing from equal samples. Try other "
        "prompts (`--prompt`) or a higher temperature.",
    )


def find_seed(state: EngineState) -> Finding:
    """Check that the same seed gives the same samples."""
    first = [[*t.prompt_ids, *t.completion_ids] for t in state.trajectories]
    again = [[*t.prompt_ids, *t.completion_ids] for t in state.sample()]
    if first == again:
        return Finding(status="pass", evidence=f"{len(first)} trajectories, token by token.")
    row = next(i for i, (a, b) in enumerate(zip(first, again, strict=True)) if a != b)
    spot = num_common(first[row], again[row])
    tokenizer = state.learner.subject.tokenizer
    return Finding(
        status="fail",
        evidence=f"Row {row} parts: {show_ids(tokenizer, first[row], spot)}, then "
        f"{show_ids(tokenizer, again[row], spot)}",
        remedy="Runs can't be repeated with this engine; check that it uses the request's seed.",
    )


def find_weights(state: EngineState) -> Finding:
    """Check that a sync changes the engine's logprobs to those of the changed learner."""
    learner = copy.deepcopy(state.model)
    head = _weight(learner.get_output_embeddings())
    others = [parameter for parameter in learner.parameters() if parameter is not head]
    name = "tied head" if _is_tied(learner) else "head"
    seen, trajectories, is_stale = [], state.trajectories, False
    try:
        for part, parameters in ((name, [head]), ("other weights", others)):
            _nudge(parameters)
            before = state.gap(learner, trajectories)
            state.engine.update_policy(learner)
            trajectories = state.sample()
            after = state.gap(learner, trajectories)
            seen.append(f"{part}: {before.max:.2g} away before the sync, {after.max:.1e} after it")
            is_stale |= not (state.bound.holds(after) and 2 * after.mean < before.mean)
    finally:
        state.engine.update_policy(state.model)
    return Finding(
        status="fail" if is_stale else "pass",
        evidence=f"{'; '.join(seen)}.",
        remedy="The engine goes on with old weights or old caches after `update_policy`; use "
        "another engine."
        if is_stale
        else "",
    )


@torch.no_grad()
def _nudge(parameters: Iterable[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        generator = torch.Generator(parameter.device).manual_seed(_SEED)
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        parameter.add_((noise * _NUDGE * parameter.abs().float().mean()).to(parameter.dtype))


def find_half_precision(state: EngineState) -> Finding:
    """Measure how far apart engine and learner are in bfloat16; a figure, not a test."""
    if not isinstance(state.given, str) or state.model.dtype != torch.float32:
        return Finding(status="skipped", evidence="Measured for a float32 model and named engines.")
    state.engine.close()
    half = copy.deepcopy(state.model).to(torch.bfloat16)  # type: ignore[arg-type]
    with state.build(state.given, half) as engine:
        gap = state.gap(half, state.sample(engine))
    return Finding(
        status="note",
        evidence=f"In bfloat16 engine and learner are apart by {gap}.",
        remedy="For ratios that are 1 before a step train in float32; in bfloat16 take the "
        "engine's logprobs as the old ones or correct for them.",
    )


MODEL_CHECKS: list[Check[LearnerState]] = [
    Check(
        name="model",
        find=find_model,
        needs=("tokenizer",),
        remedy="Give a folder or an id of a causal language model; `--no-engines` checks the "
        "template alone.",
    ),
    Check(name="vocabulary", find=find_vocabulary, needs=("model",)),
]
ENGINE_CHECKS: list[Check[EngineState]] = [
    Check(
        name="engine",
        find=find_engine,
        needs=("vocabulary", TEMPLATE),
        remedy="Check that the engine has this architecture; the torch engine has them all.",
    ),
    Check(name="mask and shift", find=find_mask_and_shift, needs=("engine",)),
    Check(name="logprobs", find=find_logprobs, needs=("mask and shift",)),
    Check(name="samples differ", find=find_samples, needs=("engine",)),
    Check(name="same seed", find=find_seed, needs=("engine",)),
    Check(name="weights follow", find=find_weights, needs=("logprobs",)),
    Check(name="bfloat16", find=find_half_precision, needs=("logprobs",)),
]
