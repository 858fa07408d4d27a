"""Score the rows of TRL's GRPO batches as prefix trees, so that shared tokens are computed once.

Owns when that is done: `shared_prefix`, what the model allows, and whether the first batch agrees with
TRL's rows. Invariants: TRL gets the same values per row and column as without trees; an optimizer
step trains the same rows.

Legend: B rows, P prompt, C completion, T = P + C, N positions of a tree.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from agent_vllm.engines.learner import plain_model
from agent_vllm.training import (
    GapBound,
    PrefixTree,
    logprob_gap,
    reason_against_tree,
    tree_inputs,
    use_tree_attention,
)
from trl_integration.config import AgentGRPOConfig
from trl_integration.processes import gather, gather_flags

_FLOAT32 = GapBound(mean=1e-4, worst=2.5e-3)  # sums in another order differ by less than 1e-5
_HALF = GapBound(mean=0.05, worst=1.25)

# logprobs [B, C], entropies [B, C] and the routers' loss []; None where TRL asked for none
Scores = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Batch = dict[str, Any]  # as TRL's trainer buffers them


class SharedPrefixMixin(GRPOTrainer):
    """[`~trl.GRPOTrainer`] that computes what the rows of a micro-batch share once."""

    args: AgentGRPOConfig
    _uses_trees = False  # until `_start_trees`
    _is_compared = False  # the first batch, with TRL's rows

    def _start_trees(self, longest_row: int) -> None:
        """
        Switch the models to the attention that trees need, as `shared_prefix` says.

        Args:
            longest_row: the most tokens that a row can have.

        Raises:
            ValueError: trees are demanded, and they can't be had.
        """
        if self.args.shared_prefix == "off":
            return
        models = [plain_model(model) for model in (self.model, self.ref_model) if model is not None]
        reason = next(self._reasons_against_trees(models, longest_row), None)
        if reason is None:
            for model in models:
                use_tree_attention(model, longest_row)
            self._uses_trees = True
        elif self.args.shared_prefix == "on":
            raise ValueError(
                f'`shared_prefix` must be "auto" or "off" here, got "on": {reason}. Choose "auto".'
            )
        else:
            self.accelerator.print(
                f"The learner computes the tokens that rows share once per row: {reason}. Pass "
                'shared_prefix="off" to leave this line out.'
            )

    def _reasons_against_trees(
        self, models: Sequence[PreTrainedModel], longest_row: int
    ) -> Iterator[str]:
        if self.args.torch_compile:
            yield "`torch_compile` needs one shape, and every tree has its own"
        if self.aux_loss_enabled:
            yield "the routers' load-balancing loss counts the tokens of rows"
        for model in models:
            reason = reason_against_tree(model, longest_row)
            if reason is not None:
                yield f"{type(model).__name__}'s {reason}"

    # ---- TRL's methods, in the order in which TRL calls them ----

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self._uses_trees or self._buffered_inputs is before:
            return inputs
        # TRL's shuffle parts groups. An optimizer step keeps its rows, its micro-batches exchange them.
        num_steps = cast(int, self.args.steps_per_generation)  # set by TRL's config
        in_one_step = math.gcd(num_steps, self.args.gradient_accumulation_steps)
        self._buffered_inputs = [
            batch
            for first in range(0, num_steps, in_one_step)
            for batch in with_whole_groups(self._buffered_inputs[first : first + in_one_step])
        ]
        return self._buffered_inputs[self._step % num_steps]

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **kwargs: Any,
    ) -> Scores:
        def of_rows() -> Scores:
            return super(SharedPrefixMixin, self)._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size,
                compute_entropy,
                **kwargs,
            )

        if not self._uses_trees or any(value is not None for value in _images(kwargs)):
            return of_rows()
        num_rows = batch_size or len(input_ids)
        parts = zip(input_ids.split(num_rows), attention_mask.split(num_rows), strict=True)
        trees = [PrefixTree.of_rows(ids, mask) for ids, mask in parts]
        if compute_entropy:
            self._log_ratio(trees)
        if not all(tree.num_tokens for tree in trees):
            return of_rows()  # nothing follows anything

        def of_trees() -> Scores:
            scores = [self._score(model, tree, logits_to_keep) for tree in trees]
            logps, entropies = zip(*scores, strict=True)
            return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

        if self._is_compared:
            return of_trees()
        self._is_compared = True
        return self._first(of_trees, of_rows, attention_mask[:, -logits_to_keep:].bool())

    def _log_ratio(self, trees: Sequence[PrefixTree]) -> None:
        counts = [[sum(t.num_row_tokens for t in trees), sum(t.num_tokens for t in trees)]]
        totals = gather(self.accelerator, torch.tensor(counts, device=self.accelerator.device))
        num_row_tokens, num_tree_tokens = totals.sum(0).tolist()
        mode = "train" if cast(PreTrainedModel, self.model).training else "eval"
        ratio = num_row_tokens / max(num_tree_tokens, 1)
        self._metrics[mode]["shared_prefix/ratio"].append(ratio)

    def _score(
        self, model: Any, tree: PrefixTree, logits_to_keep: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logprobs and entropies `[B, C]` by TRL's fused head; without entropies, zeros."""
        is_scored = torch.zeros_like(tree.is_real)
        is_scored[:, -logits_to_keep:] = True
        with self.accelerator.autocast():
            outputs = model(
                **tree_inputs(tree), shift_labels=tree.labels(is_scored), fused_lm_head=True
            )
        entropy = (
            torch.zeros_like(outputs.log_probs) if outputs.entropy is None else outputs.entropy
        )
        logps, entropies = (
            tree.by_row(packed)[:, -logits_to_keep:] for packed in (outputs.log_probs, entropy)
        )
        return logps, entropies

    def _first(
        self, of_trees: Callable[[], Scores], of_rows: Callable[[], Scores], mask: torch.Tensor
    ) -> Scores:
        """Compare the first batch with TRL's rows; return the trees' scores, or fall back."""
        with torch.no_grad():
            rows = of_rows()
        trees = of_trees()
        bound = _FLOAT32 if self._computes_in_float32 else _HALF
        with torch.no_grad():
            gaps = [
                logprob_gap(row, tree, mask)
                for row, tree in zip(rows, trees, strict=True)
                if row is not None and tree is not None
            ]
        if all(gather_flags(self.accelerator, all(map(bound.holds, gaps)))[0]):
            return trees
        mean, worst = max(gap.mean for gap in gaps), max(gap.max for gap in gaps)
        message = (
            f"the learner's logprobs on a prefix tree differ from those on rows by {mean:.3g} "
            f"nats on average and by {worst:.3g} at most, more than rounding explains"
        )
        if self.args.shared_prefix == "on":
            raise ValueError(
                f'`shared_prefix` must be "auto" or "off" here, got "on": {message}. Choose "auto".'
            )
        self._uses_trees = False
        self.accelerator.print(f"Warning: {message}. Rows are used from now on.")
        return of_rows()

    @property
    def _computes_in_float32(self) -> bool:
        is_mixed = self.accelerator.mixed_precision != "no" or self.args.tf32
        return not is_mixed and plain_model(self.model).dtype == torch.float32


def _images(kwargs: dict[str, Any]) -> list[Any]:
    return [value for name, value in kwargs.items() if name != "compute_aux_loss"]


def with_whole_groups(batches: Sequence[Batch]) -> list[Batch]:
    """
    Exchange rows between micro-batches so that rows with the same prompt stand together.

    Every micro-batch keeps its number of rows. Where groups fit in whole, none is parted; the micro-batches
    then have about the same number of distinct tokens.

    Args:
        batches: micro-batches of TRL's trainer, with the same number of rows each.
    """
    if len(batches) == 1:
        return list(batches)
    whole = {name: _joined([batch[name] for batch in batches]) for name in batches[0]}
    prompts = whole["prompt_ids"].masked_fill(whole["prompt_mask"] == 0, -1)
    group_of_row = torch.unique(prompts, dim=0, return_inverse=True)[1].tolist()
    order = grouped_order(
        group_of_row,
        whole["prompt_mask"].sum(1).tolist(),
        whole["completion_mask"].sum(1).tolist(),
        len(batches),
    )
    picked = {name: _picked(value, order) for name, value in whole.items()}
    return split_tensor_dict(picked, len(batches))


def grouped_order(
    group_of_row: Sequence[int],
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    num_batches: int,
) -> list[int]:
    """Return the rows of all batches in order: largest group first, to the batch with the fewest tokens."""
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(group_of_row):
        groups.setdefault(group, []).append(row)

    def num_tokens(rows: Sequence[int]) -> int:  # if completions share nothing
        return prompt_lengths[rows[0]] + sum(completion_lengths[row] for row in rows)

    size = len(group_of_row) // num_batches
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    totals = [0] * num_batches
    for rows in sorted(groups.values(), key=num_tokens, reverse=True):
        while rows:
            room = [size - len(batch) for batch in batches]
            fitting = [i for i in range(num_batches) if room[i] >= len(rows)]
            # else to the one with the most room
            i = min(
                fitting,
                key=totals.__getitem__,
                default=max(range(num_batches), key=room.__getitem__),
            )
            part, rows = rows[: room[i]], rows[room[i] :]
            batches[i] += part
            totals[i] += num_tokens(part)
    return [row for batch in batches for row in batch]


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor) and first.ndim > 0:
        return torch.cat(list(values))
    if isinstance(first, list):
        return [item for value in values for item in value]
    return first  # a scalar of the whole batch, or None


def _picked(value: Any, order: list[int]) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        return value[order]
    return [value[i] for i in order] if isinstance(value, list) else value
