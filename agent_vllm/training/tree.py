"""Merge rows of tokens into one prefix tree, so that a model computes what rows share once.

Owns which predictions are the same. Invariant: two predictions share a position if and only if they
follow the same tokens and predict the same one, so every position has one label.

    row 0   A B C D        positions of the predictions
    row 1   A B C E        B C D      0 1 2      row 0 computes A B C
    row 2   A B F          B C E      0 1 3      row 1 adds C, which predicts E here
                           B F        0 4        row 2 adds B, which predicts F here

Legend: B rows, T columns, N positions: distinct predictions of all rows.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """Hold one row's own part of a tree: consecutive positions, and the tokens that they see.

    `runs` cover the positions from the row's first token to its last, in order: parts of earlier
    branches, then the branch itself. The branch's positions are the last ones.
    """

    num_positions: int  # at least 1
    runs: tuple[slice, ...]

    @property
    def run_lengths(self) -> list[int]:
        return [run.stop - run.start for run in self.runs]

    @property
    def is_root(self) -> bool:
        """Return whether the branch sees itself only."""
        return len(self.runs) == 1


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """Hold the distinct predictions of rows as one packed row, built by [`PrefixTree.of_rows`]."""

    input_ids: torch.Tensor  # [1, N] int64; the model's input at each position
    position_ids: torch.Tensor  # [1, N] int64; counted from each row's first token
    next_ids: torch.Tensor  # [1, N] int64; the token that each position predicts
    positions: torch.Tensor  # [B, T - 1] int64; the position of the prediction of column i + 1
    is_real: torch.Tensor  # [B, T - 1] bool; False where column i or i + 1 is padding
    branches: tuple[Branch, ...]
    num_row_tokens: int  # real tokens of all rows

    @classmethod
    def of_rows(cls, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> "PrefixTree":
        """
        Build the tree of rows.

        Args:
            input_ids: `[B, T]` int64.
            attention_mask: `[B, T]`, not 0 on real tokens. Padding may be on both sides of a row.

        Raises:
            ValueError: padding inside of a row.
        """
        device, mask = input_ids.device, attention_mask.bool().cpu()
        lengths, firsts = mask.sum(1), mask.int().argmax(1)
        columns = torch.arange(mask.shape[1])
        if not torch.equal(mask, _between(columns, firsts, firsts + lengths)):
            raise ValueError("`attention_mask` must have padding at the ends of a row, got a gap.")
        # from here on, rows begin at column 0 and stand in lexicographic order
        sources = (firsts[:, None] + columns).clamp(max=mask.shape[1] - 1)
        ids = input_ids.cpu().gather(1, sources).masked_fill(columns >= lengths[:, None], -1)
        order = _lexicographic(ids, lengths)
        num_predictions = (lengths[order] - 1).clamp(min=0)
        starts = torch.minimum(_num_shared(ids[order]), num_predictions)
        offsets = (num_predictions - starts).cumsum(0) - (num_predictions - starts)
        # the position of column i is with the latest row that has not shared it
        owners = torch.where(starts[:, None] <= columns, torch.arange(len(ids))[:, None], 0)
        owners = owners.cummax(0).values
        positions = (offsets[owners] + columns - starts[owners])[:, :-1]
        is_own = _between(columns, starts, num_predictions)[:, :-1]
        # back to the caller's order and columns
        shifts = (columns[:-1] - firsts[:, None]).clamp(min=0)
        return cls(
            input_ids=ids[order][:, :-1][is_own][None].to(device),
            position_ids=columns[:-1].expand_as(is_own)[is_own][None].to(device),
            next_ids=ids[order][:, 1:][is_own][None].to(device),
            positions=positions[order.argsort()].gather(1, shifts).to(device),
            is_real=(mask[:, :-1] & mask[:, 1:]).to(device),
            branches=_branches(starts.tolist(), num_predictions.tolist(), offsets.tolist()),
            num_row_tokens=int(lengths.sum()),
        )

    @property
    def num_tokens(self) -> int:
        """Return N, the number of tokens that the model computes."""
        return self.input_ids.shape[1]

    def labels(self, is_scored: torch.Tensor) -> torch.Tensor:
        """
        Return the labels of a packed row, which need no shift.

        Args:
            is_scored: `[B, T - 1]` bool; column i belongs to the prediction of column i + 1.

        Returns:
            `[1, N]` int64: the next token, -100 where no row is scored.
        """
        labels = torch.full_like(self.next_ids, -100)
        scored = self.positions[is_scored & self.is_real]
        labels[0, scored] = self.next_ids[0, scored]
        return labels

    def by_row(self, packed: torch.Tensor) -> torch.Tensor:
        """
        Give each row the values of its positions; gradients of shared ones add up.

        Args:
            packed: `[1, N]`, a value per position.

        Returns:
            `[B, T - 1]`; column i belongs to the prediction of column i + 1; 0 at padding.
        """
        positions = self.positions.masked_fill(~self.is_real, 0)
        values = packed[0].index_select(0, positions.flatten()).view_as(positions)
        return values.masked_fill(~self.is_real, 0)


def _between(columns: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """Return `[B, T]` bool: from each row's start to before its stop."""
    return (starts[:, None] <= columns) & (columns < stops[:, None])


def _lexicographic(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the order `[B]` that sorts rows; a row stands before those that it is a prefix of."""
    big_endian = ids.numpy().astype(">u4")  # bytes compare as the ids do
    rows = [row[:n].tobytes() for row, n in zip(big_endian, lengths.tolist(), strict=True)]
    return torch.tensor(sorted(range(len(rows)), key=rows.__getitem__))


def _num_shared(ids: torch.Tensor) -> torch.Tensor:
    """Return `[B]`: how many predictions each row shares with the row before it."""
    is_same = (ids[1:] == ids[:-1]).long()
    num_tokens = torch.nn.functional.pad(is_same.cumprod(1).sum(1), (1, 0))
    return (num_tokens - 1).clamp(min=0)


def _branches(starts: list[int], stops: list[int], offsets: list[int]) -> tuple[Branch, ...]:
    """Find each row's path: walk back through the rows that own what the row has not."""
    branches = []
    for row, (start, stop, offset) in enumerate(zip(starts, stops, offsets, strict=True)):
        if start == stop:
            continue
        runs, end = [slice(offset, offset + stop - start)], start
        for owner in range(row - 1, -1, -1):
            if starts[owner] < end:
                runs.append(slice(offsets[owner], offsets[owner] + end - starts[owner]))
                end = starts[owner]
        branches.append(Branch(num_positions=stop - start, runs=tuple(runs[::-1])))
    return tuple(branches)
