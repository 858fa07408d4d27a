"""Small learners for tests of weights: plain, wrapped, with packed experts."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM


def learner(tied=True):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=tied,
        )
    )


def packed_model(**changes):
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **{
                "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
                "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2,
                "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
                "head_dim": 8, "max_position_embeddings": 256, **changes,
            }
        )
    )  # fmt: skip


class Wrapper(torch.nn.Module):
    """Names its child as DDP does."""

    def __init__(self, module):
        super().__init__()
        self.module = module
