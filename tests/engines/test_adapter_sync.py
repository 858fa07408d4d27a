"""A PEFT learner's weights in the engines: the adapter alone, or merged into copies."""

import copy
import random

import pytest
import torch
from adapted import adapted
from agreement import TOLERANCE, gap
from learners import packed_model
from transformers import Gemma2Config, Gemma2ForCausalLM

from agent_vllm import TorchRolloutEngine, VLLMRolloutEngine
from agent_vllm.engines.learner import LearnerWeights
from agent_vllm.errors import WeightSyncError


def train_a_step(model, lr=1e-2):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    ids = torch.randint(10, 300, (2, 16), generator=torch.manual_seed(0))
    model.train()(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.zero_grad()


@pytest.mark.vllm
def test_vllm_follows_an_adapter_that_is_sent_by_itself(agent):
    """Ranks and scalings of layers differ; each version is served, never an older one."""
    model = adapted(agent[0], rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3})
    base_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    with VLLMRolloutEngine(model, agent[1]) as engine:
        assert engine.num_synced_bytes > base_bytes  # once
        gaps = [gap(engine, model)]
        for _ in range(3):
            train_a_step(model)
            engine.update_policy(model)
            gaps.append(gap(engine, model))
            assert engine.num_synced_bytes == sum(
                p.nbytes for p in model.parameters() if p.requires_grad
            )
        assert max(gaps) <= TOLERANCE, gaps
        train_a_step(model)
        assert gap(engine, model) > 100 * TOLERANCE  # the check can fail


@pytest.mark.vllm
def test_vllm_follows_merged_weights_when_told_to(agent):
    model = adapted(agent[0])
    with VLLMRolloutEngine(model, agent[1], adapter_sync="merged") as engine:
        first = gap(engine, model)
        train_a_step(model)
        engine.update_policy(model)
        assert max(first, gap(engine, model)) <= TOLERANCE


def test_the_torch_engine_runs_the_adapted_learner_itself(agent):
    model = adapted(agent[0], use_dora=True)
    with TorchRolloutEngine(model, agent[1]) as engine:
        first = gap(engine, model)
        train_a_step(model)
        engine.update_policy(model)
        assert max(first, gap(engine, model)) <= TOLERANCE
        assert engine.num_synced_bytes == 0


@pytest.mark.vllm
def test_one_engine_takes_any_learner_by_the_way_that_fits_it(agent, agent_path):
    """Built from a path: a plain learner, DoRA, a trained norm, and a base that is quantised."""
    model, _ = agent
    with VLLMRolloutEngine(agent_path, adapter_sync="adapter") as engine:
        lora = adapted(copy.deepcopy(model))
        engine.update_policy(lora)
        assert gap(engine, lora) <= TOLERANCE
        engine._base = None  # as at the start: the checkpoint's own base is in place
        lora.get_base_model().config.quantization_config = {
            "quant_method": "bitsandbytes"
        }  # a stub
        train_a_step(lora)
        engine.update_policy(lora)
        assert gap(engine, lora) <= TOLERANCE
        assert engine.num_synced_bytes == sum(
            p.nbytes for p in lora.parameters() if p.requires_grad
        )
        dora = adapted(copy.deepcopy(model), use_dora=True)
        with pytest.raises(WeightSyncError, match="can't be sent by itself"):
            engine.update_policy(dora)
        engine._adapter_sync = "auto"
        for learner in (dora, adapted(copy.deepcopy(model), modules_to_save=["norm"]), model):
            engine.update_policy(learner)
            assert gap(engine, learner) <= TOLERANCE


def test_an_unknown_way_of_syncing_is_refused_by_name(agent):
    with pytest.raises(ValueError, match=r"`adapter_sync` must be one of .*'merged'.*, got 'both'"):
        VLLMRolloutEngine(*agent, adapter_sync="both")


def test_a_head_that_only_the_learner_keeps_in_float32_is_refused(agent):
    model, tokenizer = agent
    model.bfloat16().lm_head.float()
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32=False"):
        VLLMRolloutEngine(model, tokenizer)


@pytest.mark.vllm
@pytest.mark.parametrize("tied", [True, False])
def test_packed_experts_and_heads_move_with_every_sync(agent, tied):
    _, tokenizer = agent
    model = packed_model(
        tie_word_embeddings=tied, vocab_size=len(tokenizer), hidden_size=64,
        intermediate_size=64, moe_intermediate_size=32, head_dim=32,
    )  # fmt: skip
    with VLLMRolloutEngine(model, tokenizer) as engine:
        gaps = [gap(engine, model)]
        for _ in range(2):
            train_a_step(model)
            engine.update_policy(model)
            gaps.append(gap(engine, model))
    assert max(gaps) <= TOLERANCE, gaps


@pytest.mark.vllm
def test_weights_that_vllm_does_not_load_are_named(agent, vllm_engine, monkeypatch):
    """vLLM itself only logs it."""
    model, _ = agent

    def without_norm(weights):
        return load((name, t) for name, t in weights if name != "model.norm.weight")

    inner = vllm_engine._stepper._llm.model_executor.driver_worker.model_runner.get_model()
    load = inner.load_weights
    monkeypatch.setattr(inner, "load_weights", without_norm)
    with pytest.raises(WeightSyncError, match=r"none .* into \['model.norm.weight'\]"):
        vllm_engine.update_policy(model)
    monkeypatch.undo()
    vllm_engine.update_policy(model)
    assert gap(vllm_engine, model) <= TOLERANCE


@pytest.mark.vllm
def test_the_order_of_tensors_does_not_matter(agent, vllm_engine, monkeypatch):
    """vLLM fuses q, k and v, and gate and up; they may come far apart."""
    model, _ = agent

    def shuffled(weights, **options):
        tensors = list(in_order(weights, **options))
        random.Random(0).shuffle(tensors)
        yield from tensors

    in_order = LearnerWeights.tensors
    monkeypatch.setattr(LearnerWeights, "tensors", shuffled)
    train_a_step(model)
    vllm_engine.update_policy(model)
    assert gap(vllm_engine, model) <= TOLERANCE


@pytest.mark.vllm
def test_a_tied_head_comes_once_where_vllms_model_has_no_head(agent):
    """Gemma 2: vLLM's class computes logits with the embedding and knows no `lm_head`."""
    _, tokenizer = agent
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32,
        max_position_embeddings=256, sliding_window=256, attn_implementation="eager",
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    with VLLMRolloutEngine(model, tokenizer) as engine:
        train_a_step(model)
        engine.update_policy(model)
        assert gap(engine, model) <= 1e-4
