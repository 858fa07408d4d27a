"""A learner's weights by their plain names, whatever it is wrapped in, sharded by or packed as."""

from contextlib import closing

import pytest
import torch
from adapted import adapted
from learners import GatheredParameters, Wrapper, learner, packed_model
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
)

from agent_vllm import TorchRolloutEngine
from agent_vllm.engines.learner import LearnerWeights, check_shapes, model_source
from agent_vllm.engines.learner import weights as weights_module
from agent_vllm.errors import WeightSyncError


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_comes_under_both_its_names(tied):
    weights = dict(LearnerWeights(learner(tied)).tensors())
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= weights.keys()
    same = weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    assert same == tied


def test_wrappers_in_any_order_leave_plain_names():
    model = learner()
    plain = list(LearnerWeights(model).shapes)
    assert list(LearnerWeights(Wrapper(model)).shapes) == plain
    assert list(LearnerWeights(torch.compile(model)).shapes) == plain
    assert list(LearnerWeights(Wrapper(torch.compile(Wrapper(model)))).shapes) == plain
    model.model.layers[0] = checkpoint_wrapper(Wrapper(checkpoint_wrapper(model.model.layers[0])))
    assert list(LearnerWeights(Wrapper(torch.compile(model))).shapes) == plain


def test_a_child_called_module_is_no_wrapper_where_it_has_siblings():
    parent = torch.nn.Module()
    parent.module, parent.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    parent.config = learner().config
    names = ["module.weight", "module.bias", "other.weight", "other.bias"]
    assert list(LearnerWeights(parent).shapes) == names


def test_fsdp1_is_refused_with_what_to_use():
    flat = torch.nn.Module()
    flat._fsdp_wrapped_module = learner()
    with pytest.raises(WeightSyncError, match="fsdp_version: 2"):
        LearnerWeights(flat).tensors()


def test_matrices_are_cast_to_the_engines_dtype_and_the_learner_keeps_its_own():
    model = learner(tied=False)
    weights = LearnerWeights(model, dtype=torch.bfloat16)
    tensors = dict(weights.tensors())
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    assert dtypes == {name: tensor.dtype for name, tensor in weights.meta.items()}
    assert dtypes["lm_head.weight"] == torch.bfloat16
    assert dtypes["model.norm.weight"] == torch.float32  # a vector
    assert weights.num_bytes_read == sum(tensor.nbytes for tensor in tensors.values())
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight.bfloat16())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_tensors_are_the_learners_own_without_gradients():
    model = learner()
    weight = dict(LearnerWeights(model).tensors())["model.norm.weight"]
    assert weight.data_ptr() == model.model.norm.weight.data_ptr()
    assert not weight.requires_grad and model.model.norm.weight.requires_grad


def test_missing_unknown_and_misshapen_tensors_are_named():
    expected, given = LearnerWeights(learner()).shapes, LearnerWeights(learner()).shapes
    check_shapes(expected, given)
    given["extra"] = given.pop("model.norm.weight")
    given["lm_head.weight"] = torch.Size([3, 16])
    with pytest.raises(WeightSyncError) as error:
        check_shapes(expected, given)
    message = str(error.value)
    assert "Missing: ['model.norm.weight']" in message
    assert "Unknown: ['extra']" in message
    assert "lm_head.weight: [3, 16] instead of [32, 16]" in message


# ---- DeepSpeed ZeRO-3, by a stand-in ----


def test_zero3_is_gathered_one_by_one_in_order_and_freed(zero3):
    model, whole = zero3
    assert LearnerWeights(model).is_sharded and not LearnerWeights(whole).is_sharded
    assert list(LearnerWeights(Wrapper(model)).shapes.items()) == list(
        LearnerWeights(whole).shapes.items()
    )
    assert GatheredParameters.log == []  # names and shapes cost no collective call
    got = dict(
        LearnerWeights(Wrapper(model)).tensors()
    )  # each is kept past the next one's gathering
    expected = dict(LearnerWeights(whole).tensors())
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    order = [event for event, _ in GatheredParameters.log]
    assert order == ["gather", "free"] * len(expected)  # the tied head twice
    assert all(parameter.numel() == 0 for parameter in model.parameters())


def test_an_iterator_that_is_closed_early_gathers_the_rest(zero3):
    """Other ranks gather to the end; who fails must go on with them."""
    model, _ = zero3
    LearnerWeights(model).join_gathers()
    whole = list(GatheredParameters.log)
    GatheredParameters.log.clear()
    with closing(LearnerWeights(model).tensors()) as weights:
        next(weights)
    assert GatheredParameters.log == whole


def test_an_iterator_that_is_closed_before_its_first_tensor_gathers_all(zero3):
    model, _ = zero3
    LearnerWeights(model).join_gathers()
    whole = list(GatheredParameters.log)
    GatheredParameters.log.clear()
    LearnerWeights(model).tensors().close()
    assert GatheredParameters.log == whole


def test_one_value_walks_the_learner_once_and_counts_what_it_hands_out(monkeypatch):
    model = adapted(learner())
    walks = []
    walk = weights_module._walk
    monkeypatch.setattr(
        weights_module,
        "_walk",
        lambda module, *rest: walks.append(module) or walk(module, *rest),
    )
    weights = LearnerWeights(Wrapper(model))
    assert weights.num_bytes_read == 0
    base = {name: tensor.clone() for name, tensor in weights.tensors(merged=False)}
    num_bytes = sum(tensor.nbytes for tensor in base.values())
    assert weights.num_bytes_read == num_bytes
    num_base_walks = len(walks)
    merged = {name: tensor.clone() for name, tensor in weights.tensors()}
    assert weights.num_bytes_read == 2 * num_bytes
    assert {name: tensor.shape for name, tensor in merged.items()} == weights.shapes
    adapter = weights.adapter_tensors()
    assert weights.num_bytes_read == 2 * num_bytes + sum(t.nbytes for t in adapter.values())
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {name.replace("lora_A.", "") for name in adapter if ".lora_A." in name}
    assert walks[:num_base_walks].count(weights.model) == walks.count(weights.model) == 1


def test_the_torch_engine_copies_a_sharded_learner_and_gathers_in_no_rollout(zero3, tokenizer):
    model, whole = zero3
    random_state = torch.get_rng_state()
    with TorchRolloutEngine(model, tokenizer) as engine:
        assert torch.equal(torch.get_rng_state(), random_state)
        assert engine.num_synced_bytes > 0
        GatheredParameters.log.clear()
        ids = torch.tensor([[5, 6, 7]])
        sampled = engine.rollout(ids, torch.ones_like(ids), 2, 6)
        assert GatheredParameters.log == []
        with torch.no_grad():
            model.model.norm.weight.shards.mul_(3)
            whole.model.norm.weight.mul_(3)
        engine.update_policy(model)
        moved = engine.rollout(ids, torch.ones_like(ids), 2, 6, temperature=0)
    with TorchRolloutEngine(whole, tokenizer) as reference:
        assert reference.num_synced_bytes == 0  # shared
        expected = reference.rollout(ids, torch.ones_like(ids), 2, 6, temperature=0)
    assert torch.equal(moved.completion_ids, expected.completion_ids)
    assert torch.equal(moved.per_token_logps, expected.per_token_logps)
    assert sampled.completion_ids.shape[0] == 2


# ---- as the checkpoint has them ----


@pytest.mark.parametrize("tied", [True, False])
def test_packed_experts_come_one_by_one_as_in_the_checkpoint(tied, tmp_path):
    model = packed_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    weights = dict(LearnerWeights(model).tensors())
    assert weights.keys() - saved.keys() == ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    assert LearnerWeights(model).shapes == {name: tensor.shape for name, tensor in weights.items()}
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in weights


def test_a_packed_learner_is_read_one_packed_tensor_at_a_time():
    """The largest read is one of the learner's own tensors, never the model."""
    model = packed_model()
    units = LearnerWeights(model)._units
    reads = [sum(t.numel() for t in unit.meta.values()) for unit in units]
    assert max(reads) == max(p.numel() for p in model.parameters())


def test_the_text_part_of_a_vision_model_does_not_pass_for_the_whole():
    """Its weights have other names; the engine says so before a rollout."""
    text = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = Gemma3Config(text_config=Gemma3TextConfig(**text).to_dict(), vision_config=vision)
    both = Gemma3ForConditionalGeneration(config)
    names = LearnerWeights(both).shapes
    assert any(name.startswith("language_model.model.layers.0") for name in names), list(names)[:3]
    inner = {name: s for name, s in names.items() if not name.startswith("language_model.")}
    with pytest.raises(WeightSyncError, match=r"Missing: .*language_model\.model"):
        check_shapes(names, inner)


# ---- what has no plain weights ----


@pytest.mark.parametrize("kind", ["config", "integers"])
def test_a_quantised_base_is_refused_with_what_works(kind):
    model = learner()
    if kind == "config":
        model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    else:
        packed = torch.zeros(4, dtype=torch.uint8)
        model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(packed, requires_grad=False)
    weights = LearnerWeights(model)
    assert weights.is_quantised and not LearnerWeights(learner()).is_quantised
    for read in (weights.tensors, lambda: weights.shapes):
        with pytest.raises(WeightSyncError, match=r"quantised.*LoRA adapter"):
            read()


def test_the_engines_type_is_that_of_most_weights_and_the_heads_is_known(tokenizer):
    """TRL casts the head alone, and with it a tied embedding, which comes first."""
    model = learner(tied=True).bfloat16()
    model.lm_head.float()
    assert model.model.embed_tokens.weight.dtype == torch.float32
    source = model_source(model, tokenizer)
    assert (source.dtype, source.head_dtype) == (torch.bfloat16, torch.float32)
