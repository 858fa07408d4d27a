"""A float32 learner under bfloat16 autocast, with a bfloat16 engine."""

import types

import pytest
import torch
from agreement import gap
from learners import learner
from trainers import REWARDS, TOOLS

from agent_vllm import VLLMRolloutEngine
from agent_vllm.engines.learner import LearnerWeights
from trl_integration import engine_life
from trl_integration.engine_life import EngineLife


@pytest.mark.vllm
def test_a_bfloat16_engine_follows_a_float32_learner(agent):
    model, tokenizer = agent
    with VLLMRolloutEngine(model, tokenizer, dtype="bfloat16") as engine:
        assert engine.dtype == torch.bfloat16
        weights = LearnerWeights(model)
        matrices = sum(t.nbytes for _, t in weights.tensors() if t.dim() > 1)
        assert engine.num_synced_bytes == weights.num_bytes_read - matrices // 2
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.05)
        old = gap(engine, model)
        engine.update_policy(model)
        assert gap(engine, model) < min(2.0, old / 2)
    assert model.dtype == torch.float32


@pytest.mark.vllm
def test_training_under_autocast_measures_a_gap_that_rounding_explains(new_trainer):
    trainer = new_trainer(
        "own vllm",
        bf16=True,
        max_steps=1,
        rollout_engine_kwargs={"dtype": "bfloat16"},
        reward_funcs=REWARDS,
        tools=TOOLS,
    )
    trainer.train()
    (log,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert 1e-4 < log["sampling/logprob_gap/mean"] < 0.1  # float32 would be below
    assert log["sampling/logprob_gap/max"] < 2.0
    assert log["rollout/trained_tokens"] == log["rollout/sampled_tokens"]


@pytest.mark.parametrize(
    ("device", "mixed_precision", "given", "dtype"),
    [
        ("cuda", "bf16", {}, torch.bfloat16),
        ("cuda", "fp16", {}, torch.float16),
        ("cuda", "no", {}, None),
        ("cpu", "bf16", {}, None),
        ("cuda", "bf16", {"dtype": "float32"}, "float32"),
    ],
)
def test_on_a_gpu_the_engine_computes_in_the_learners_autocast_dtype(
    monkeypatch, tokenizer, device, mixed_precision, given, dtype
):
    seen = {}
    monkeypatch.setattr(
        engine_life, "create_rollout_engine", lambda *_, **options: seen.update(options)
    )
    accelerator = types.SimpleNamespace(
        device=torch.device(device), mixed_precision=mixed_precision, process_index=0
    )
    args = types.SimpleNamespace(
        seed=0, vllm_max_model_length=None, vllm_gpu_memory_utilization=0.3,
        vllm_enable_sleep_mode=False, rollout_engine_kwargs=given, per_device_train_batch_size=4,
        steps_per_generation=2, per_device_eval_batch_size=3,
    )  # fmt: skip
    EngineLife(
        "vllm", args=args, accelerator=accelerator, tokenizer=tokenizer, learner=learner,
        check_learner=lambda: None, save_state=lambda: None,
    )  # fmt: skip
    assert seen["dtype"] == dtype
    assert seen["max_num_seqs"] == 4 * 2  # the trajectories of a rollout
