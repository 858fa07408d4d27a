"""What a weight sync sends, and how long the link takes for it.

Owns the one assumption on links. Invariant: a time is a lower bound: bytes over the link's rate,
without what packing, loading and resetting caches cost.
"""

import math
from dataclasses import dataclass

from agent_vllm.errors import ScenarioError

BYTES_PER_PARAMETER = 2  # bfloat16
LINK_EFFICIENCY = 0.8  # of the nominal rate; an assumption, not a measurement
LINKS = {  # nominal bytes per second in one direction
    "device": 1.675e12,  # a copy within an H100: 3.35 TB/s, read and written
    "nvlink": 450e9,  # NVLink 4
    "pcie5": 63e9,  # 16 lanes
    "pcie4": 31.5e9,
    "400g": 50e9,  # network, in bits
    "100g": 12.5e9,
    "10g": 1.25e9,
}


def sync_seconds(num_bytes: float, link: str) -> float:
    """Seconds for so many bytes over a link of `LINKS`, at `LINK_EFFICIENCY` of its rate.

    Raises:
        ScenarioError: no such link, or no such number of bytes.
    """
    if link not in LINKS:
        raise ScenarioError(f"`link` must be one of {tuple(LINKS)}, got {link!r}.")
    if not 0 <= num_bytes < math.inf:
        raise ScenarioError(f"`sync_bytes` must be 0 or more, got {num_bytes}.")
    return num_bytes / (LINKS[link] * LINK_EFFICIENCY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """The sizes that a decoder's parameters are counted by: gated MLP, grouped queries, norms."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    tied: bool
    query_norms: bool = True
    head_dim: int = 128

    def num_parameters(self) -> int:
        """A tied head counted once."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.query_norms else 0)
        layer = sum(rows * columns for rows, columns in self._linears()) + norms
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.num_layers * layer + embeddings + self.hidden

    def num_adapter_parameters(self, rank: int) -> int:
        """LoRA of this rank on every linear layer but the head."""
        return self.num_layers * sum(rank * (rows + cols) for rows, cols in self._linears())

    def _linears(self) -> list[tuple[int, int]]:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = [(queries, self.hidden), (keys, self.hidden), (keys, self.hidden)]
        mlp = [(self.intermediate, self.hidden)] * 3
        return [*attention, (self.hidden, queries), *mlp]


_QWEN_VOCAB = 151_936
DECODERS = {
    "Qwen3-0.6B": Decoder(
        hidden=1024, intermediate=3072, num_layers=28, num_heads=16, num_kv_heads=8,
        vocab=_QWEN_VOCAB, tied=True,
    ),
    "Qwen3-1.7B": Decoder(
        hidden=2048, intermediate=6144, num_layers=28, num_heads=16, num_kv_heads=8,
        vocab=_QWEN_VOCAB, tied=True,
    ),
    "Qwen3-4B": Decoder(
        hidden=2560, intermediate=9728, num_layers=36, num_heads=32, num_kv_heads=8,
        vocab=_QWEN_VOCAB, tied=True,
    ),
    "Qwen3-8B": Decoder(
        hidden=4096, intermediate=12288, num_layers=36, num_heads=32, num_kv_heads=8,
        vocab=_QWEN_VOCAB, tied=False,
    ),
    "Qwen3-14B": Decoder(
        hidden=5120, intermediate=17408, num_layers=40, num_heads=40, num_kv_heads=8,
        vocab=_QWEN_VOCAB, tied=False,
    ),
    "Qwen3-32B": Decoder(
        hidden=5120, intermediate=25600, num_layers=64, num_heads=64, num_kv_heads=8,
        vocab=_QWEN_VOCAB, tied=False,
    ),
    "Llama-3.3-70B": Decoder(
        hidden=8192, intermediate=28672, num_layers=80, num_heads=64, num_kv_heads=8,
        vocab=128_256, tied=False, query_norms=False,
    ),
}  # fmt: skip
ADAPTER_RANK = 16


def sync_table() -> list[list[str]]:
    """Expected sync times as rows of text, the first of them the heads."""
    rows = [["model", "sent", "bytes", *LINKS]]
    for name, decoder in DECODERS.items():
        for sent, number in (
            ("all", decoder.num_parameters()),
            (f"LoRA r={ADAPTER_RANK}", decoder.num_adapter_parameters(ADAPTER_RANK)),
        ):
            num_bytes = BYTES_PER_PARAMETER * number
            seconds = [_duration(sync_seconds(num_bytes, link)) for link in LINKS]
            rows.append([name, sent, _size(num_bytes), *seconds])
    return rows


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        value = seconds * factor
        if value >= 1 or unit == "us":
            break
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
