"""List sizes of models and rates of links: the constants behind predicted sync times.

Invariant: a rate is a nominal one, in bytes per second and one direction. `LINK_EFFICIENCY` is the
only assumption on top of it.
"""

from dataclasses import dataclass

BYTES_PER_PARAMETER = 2  # bfloat16
LINK_EFFICIENCY = 0.8  # share of the nominal rate; an assumption, not a measurement
LINKS = {
    "device": 1.675e12,  # copy within an H100: 3.35 TB/s, read and written
    "nvlink": 450e9,  # NVLink 4
    "pcie5": 63e9,  # 16 lanes
    "pcie4": 31.5e9,  # 16 lanes
    "400g": 50e9,  # network, named by its Gb/s
    "100g": 12.5e9,
    "10g": 1.25e9,
}


@dataclass(frozen=True, slots=True)
class Decoder:
    """Hold the sizes that determine a decoder's number of parameters: MLP, queries, norms."""

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
        """Return the number of parameters; a tied head counts once."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.query_norms else 0)
        layer = sum(rows * columns for rows, columns in self._linears()) + norms
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.num_layers * layer + embeddings + self.hidden

    def num_adapter_parameters(self, rank: int) -> int:
        """Return the parameters of LoRA with this rank on every linear layer except the head."""
        return self.num_layers * sum(rank * (rows + cols) for rows, cols in self._linears())

    def _linears(self) -> list[tuple[int, int]]:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = [(queries, self.hidden), (keys, self.hidden), (keys, self.hidden)]
        mlp = [(self.intermediate, self.hidden)] * 3
        return [*attention, (self.hidden, queries), *mlp]


DECODERS = {  #            hidden, intermediate, layers, heads, kv heads, vocab, tied, query norms
    "Qwen3-0.6B": Decoder(1024, 3072, 28, 16, 8, 151_936, True),
    "Qwen3-1.7B": Decoder(2048, 6144, 28, 16, 8, 151_936, True),
    "Qwen3-4B": Decoder(2560, 9728, 36, 32, 8, 151_936, True),
    "Qwen3-8B": Decoder(4096, 12288, 36, 32, 8, 151_936, False),
    "Qwen3-14B": Decoder(5120, 17408, 40, 40, 8, 151_936, False),
    "Qwen3-32B": Decoder(5120, 25600, 64, 64, 8, 151_936, False),
    "Llama-3.3-70B": Decoder(8192, 28672, 80, 64, 8, 128_256, False, False),
}
