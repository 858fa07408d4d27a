"""Small learners for tests of weights: plain, wrapped, packed, and sharded by a stand-in."""

import sys
import types

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM


def learner(tied=True, **changes):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            **{
                "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
                "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
                "head_dim": 8, "tie_word_embeddings": tied, **changes,
            }
        )
    )  # fmt: skip


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


class GatheredParameters:
    """As DeepSpeed's: whole inside, and an empty tensor of another storage after it."""

    log: list[tuple[str, int]] = []  # noqa: RUF012 - what was gathered, over all instances

    def __init__(self, parameters):
        (self.parameter,) = parameters

    def __enter__(self):
        self.log.append(("gather", self.parameter.ds_id))
        self.parameter.data = self.parameter.shards.clone()

    def __exit__(self, *_):
        self.log.append(("free", self.parameter.ds_id))
        self.parameter.data = torch.empty(0)


def zero3_and_whole(monkeypatch):
    """A learner whose parameters are partitioned as by ZeRO-3, and the same one whole."""
    deepspeed = types.ModuleType("deepspeed")
    deepspeed.zero = types.SimpleNamespace(GatheredParameters=GatheredParameters)
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setattr(GatheredParameters, "log", [])
    model, whole = learner(), learner()
    model.load_state_dict(whole.state_dict())
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_shape = number, parameter.shape
        parameter.shards, parameter.data = parameter.data, torch.empty(0)
    return model, whole
