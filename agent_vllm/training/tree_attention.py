"""Run a model on a prefix tree: an attention function for transformers, and what it can't serve.

Owns the name under which the function is registered. Invariant: a position sees exactly the
tokens of its own row that come before it; without a tree the function is transformers' SDPA.

Legend: B rows, T columns, V vocabulary, H heads, K key-value heads, D head dimension, N positions
of the tree, L positions of a branch's path.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agent_vllm.training.logprobs import gather_logprobs
from agent_vllm.training.tree import Branch, PrefixTree

TREE_ATTENTION = "prefix_tree"  # for `model.set_attn_implementation`


def tree_logprobs(
    model: torch.nn.Module, tree: PrefixTree, temperature: float = 1.0
) -> torch.Tensor:
    """
    Return the logprobs of the rows of a tree, each shared token computed once.

    They are those of `predicted_logprobs`, gradients included, up to rounding. Switch the model to
    the tree's attention first, by [`use_tree_attention`].

    Args:
        model: a causal language model of transformers, or a wrapper of one.
        tree: of the rows, from [`PrefixTree.of_rows`].
        temperature: divides the logits before the softmax; must be above 0.

    Returns:
        `[B, T - 1]` float32; column i belongs to the prediction of column i + 1; 0 at padding.
    """
    logits = model(**tree_inputs(tree)).logits  # [1, N, V]
    return tree.by_row(gather_logprobs(logits, tree.next_ids, temperature))


def tree_inputs(tree: PrefixTree) -> dict[str, Any]:
    """Return a model's arguments for a forward pass over a tree; its outputs are `[1, N, ...]`."""
    return {
        "input_ids": tree.input_ids,
        "position_ids": tree.position_ids,
        # transformers passes a 4D mask through as it is and builds none for the packed row
        "attention_mask": tree.input_ids.new_ones((1, 1, 1, 1), dtype=torch.bool),
        "use_cache": False,
        "prefix_tree": tree,
    }


def use_tree_attention(model: PreTrainedModel, longest_row: int) -> None:
    """
    Switch a model to the attention that trees need; rows are computed as before.

    Args:
        longest_row: the most tokens that a row will have.

    Raises:
        ValueError: the model can't be served, with the reason.
    """
    reason = reason_against_tree(model, longest_row)
    if reason is not None:
        raise ValueError(
            f"`model` must be one that a prefix tree can serve, got one whose {reason}."
        )
    model.set_attn_implementation(TREE_ATTENTION)


def reason_against_tree(model: PreTrainedModel, longest_row: int) -> str | None:
    """Return why a model needs rows, as words that follow "its"; None if a tree serves it."""
    return next(_reasons(model, longest_row), None)


def _reasons(model: PreTrainedModel, longest_row: int) -> Iterator[str]:
    config = model.config.get_text_config()
    settings = config.to_dict()
    if config is not model.config:
        yield "inputs are not text alone"
    kinds = set(settings.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if model._is_stateful or kinds:
        names = ", ".join(sorted(kinds)) or "recurrent"
        yield f"layers are not all of plain attention ({names})"
    attention = config._attn_implementation
    if attention not in ("sdpa", TREE_ATTENTION):
        yield f'attention is "{attention}"; load it with attn_implementation="sdpa"'
    if not model._supports_attention_backend:
        yield "attention has no interface for other functions"
    window = settings.get("sliding_window")
    if window is not None and window < longest_row:
        yield f"sliding window ({window}) is shorter than a row may be ({longest_row})"
    yield from _reasons_of_positions(settings.get("rope_parameters"))
    dropout = max(_dropouts(model, settings.get("attention_dropout")), default=0.0)
    if dropout > 0:
        yield f"dropout is {dropout}, and rows that share a token would share its noise"


def _reasons_of_positions(rope: dict[str, Any] | None) -> Iterator[str]:
    if not rope:
        yield "positions are not rotary"
        return
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in by_layer_type or [rope]:
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            yield "rotary positions depend on the longest row of a batch"
        if parameters.get("mrope_section"):
            yield "positions are not counted"


def _dropouts(model: torch.nn.Module, attention_dropout: float | None) -> Iterator[float]:
    yield attention_dropout or 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            yield module.p


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    prefix_tree: PrefixTree | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attend within each row of a prefix tree: one SDPA call per branch, over the tokens of its path.

    Args:
        query: `[1, H, N, D]`; with a tree. `key` and `value`: `[1, K, N, D]`.
        prefix_tree: passed as `model(..., prefix_tree=tree)`. Without one, this is SDPA over rows.

    Returns:
        `[1, N, H, D]`, and no weights.
    """
    if prefix_tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    branches = prefix_tree.branches
    queries = query.split([branch.num_positions for branch in branches], dim=2)
    keys, values = _Paths.apply(key, branches), _Paths.apply(value, branches)
    outputs = [
        sdpa_attention_forward(module, q, k, v, _mask(branch, q, k), **kwargs)[0]
        for branch, q, k, v in zip(branches, queries, keys, values, strict=True)
    ]
    return torch.cat(outputs, dim=1), None


def _mask(branch: Branch, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return `[1, 1, own, L]` bool: the last positions of the path are the branch's own."""
    if branch.is_root:
        return None  # SDPA's own causal mask
    num_own, length = query.shape[2], key.shape[2]
    seen = torch.ones(num_own, length, dtype=torch.bool, device=query.device)
    return seen.tril_(length - num_own)[None, None]


class _Paths(torch.autograd.Function):
    """Gather each branch's path `[1, K, L, D]` from `[1, K, N, D]`; sum gradients in one buffer.

    Indexing would have a whole-size gradient per branch, or an addition per token.
    """

    @staticmethod
    def forward(
        ctx: Any, packed: torch.Tensor, branches: Sequence[Branch]
    ) -> tuple[torch.Tensor, ...]:
        ctx.branches, ctx.shape = branches, packed.shape
        return tuple(
            torch.cat([packed[:, :, run] for run in branch.runs], dim=2) for branch in branches
        )

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator has no types
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        total = grads[0].new_zeros(ctx.shape)
        for branch, grad in zip(ctx.branches, grads, strict=True):
            parts = grad.split(branch.run_lengths, dim=2)
            for run, part in zip(branch.runs, parts, strict=True):
                total[:, :, run] += part
        return total, None


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
