"""Names and shapes of a learner's weights, whatever it is wrapped in."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agent_vllm.engines.weight_sync import check_weights, named_weights, weight_shapes
from agent_vllm.errors import WeightSyncError


def learner(tied=True):
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


class Wrapper(torch.nn.Module):
    """Names its child as DDP does."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize("tied", [True, False])
def test_d11_a_tied_head_comes_under_both_its_names(tied):
    weights = dict(named_weights(learner(tied)))
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= weights.keys()
    same = weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    assert same == tied


def test_d22_wrappers_in_any_order_leave_plain_names():
    model = learner()
    plain = list(weight_shapes(model))
    assert list(weight_shapes(Wrapper(model))) == plain
    assert list(weight_shapes(torch.compile(model))) == plain
    assert list(weight_shapes(Wrapper(torch.compile(Wrapper(model))))) == plain


def test_the_tensors_are_the_learners_own_without_gradients():
    model = learner()
    weight = dict(named_weights(model))["model.norm.weight"]
    assert weight.data_ptr() == model.model.norm.weight.data_ptr()
    assert not weight.requires_grad and model.model.norm.weight.requires_grad


def test_d15_missing_unknown_and_misshapen_tensors_are_named():
    expected, given = weight_shapes(learner()), weight_shapes(learner())
    check_weights(expected, given)
    given["extra"] = given.pop("model.norm.weight")
    given["lm_head.weight"] = torch.Size([3, 16])
    with pytest.raises(WeightSyncError) as error:
        check_weights(expected, given)
    message = str(error.value)
    assert "Missing: ['model.norm.weight']" in message
    assert "Unknown: ['extra']" in message
    assert "lm_head.weight: [3, 16] instead of [32, 16]" in message
