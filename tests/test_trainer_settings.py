"""Settings that TRL checks under `use_vllm`, which the trainer sets after TRL's constructor."""

import re

import pytest
from datasets import Dataset
from fakes import chatml_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_integration import AgentGRPOConfig, AgentGRPOTrainer

VESPO = {"loss_type": "vespo", "beta": 0.0}


@pytest.fixture
def parts(tmp_path):
    """Return arguments for both stock TRL and the trainer here, and settings for a CPU."""
    tokenizer = chatml_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    prompt = [{"role": "user", "content": "hi"}]
    settings = {
        "output_dir": str(tmp_path), "per_device_train_batch_size": 2, "num_generations": 2,
        "max_completion_length": 4, "max_steps": 1, "bf16": False, "use_cpu": True,
        "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no",
        "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    return {
        "model": Qwen3ForCausalLM(config),
        "reward_funcs": lambda completions, **_: [float(i) for i in range(len(completions))],
        "train_dataset": Dataset.from_list([{"prompt": prompt}] * 2),
        "processing_class": tokenizer,
    }, settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {**VESPO, "vllm_importance_sampling_mode": "sequence_mask"},
            "vllm_importance_sampling_mode",
        ),
        (
            {**VESPO, "vllm_importance_sampling_mode": "sequence_truncate"},
            "vllm_importance_sampling_mode",
        ),
        ({"vllm_tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"vllm_mode": "elsewhere"}, "vllm_mode"),
    ],
)
def test_what_trls_constructor_refuses_under_use_vllm_is_refused_here(parts, settings, message):
    arguments, common = parts
    with pytest.raises(ValueError, match=message):
        GRPOTrainer(**arguments, args=GRPOConfig(**common, **settings, use_vllm=True))
    args = AgentGRPOConfig(**common, **settings, old_logprobs="recomputed")
    with pytest.raises(ValueError, match=f"`(vllm_)?{message}` .*must be .*got"):
        AgentGRPOTrainer(**arguments, args=args, rollout_engine="torch")


def test_an_unknown_correction_is_refused_before_the_first_rollout(parts):
    arguments, common = parts
    args = AgentGRPOConfig(
        **common, old_logprobs="recomputed", vllm_importance_sampling_mode="word_mask"
    )
    with pytest.raises(ValueError, match=r"must be one of \('token_truncate', .*got 'word_mask'"):
        AgentGRPOTrainer(**arguments, args=args, rollout_engine="torch")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm_mode", "server"),
        ("vllm_model_impl", "transformers"),
        ("vllm_structured_outputs_regex", "[0-9]{3}"),
        ("vllm_server_base_url", "http://localhost:8000"),
        ("vllm_server_host", "localhost"),
        ("vllm_server_port", 9000),
        ("vllm_server_timeout", 10.0),
        ("vllm_group_port", 9001),
    ],
)
def test_a_setting_of_trls_own_vllm_is_refused_with_a_remedy(parts, name, value):
    arguments, common = parts
    args = AgentGRPOConfig(**common, **{name: value})
    message = f"`{name}` .*must be left out, got {re.escape(repr(value))}\\. [A-Z]"
    with pytest.raises(ValueError, match=message):
        AgentGRPOTrainer(**arguments, args=args, rollout_engine="torch")


CORRECTED = [
    {"old_logprobs": "recomputed", "vllm_importance_sampling_mode": "token_mask"},
    {"old_logprobs": "recomputed", "vllm_importance_sampling_mode": "token_truncate"},
]


@pytest.mark.parametrize(
    "settings",
    [
        *CORRECTED,
        {"old_logprobs": "recomputed", "vllm_importance_sampling_correction": False},
        {"old_logprobs": "sampler", "vllm_importance_sampling_mode": "sequence_truncate"},
    ],
)
def test_vespo_trains_where_no_correction_by_sequence_is_in_use(parts, settings, capsys):
    arguments, common = parts
    args = AgentGRPOConfig(**common, **VESPO, **settings)
    trainer = AgentGRPOTrainer(**arguments, args=args, rollout_engine="torch")
    try:
        trainer.train()
    finally:
        trainer.close()
    (log,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    unused = "['vllm_importance_sampling_mode'] have no effect"
    is_sequence = settings.get("vllm_importance_sampling_mode") == "sequence_truncate"
    assert (unused in capsys.readouterr().out) == is_sequence
    is_corrected = "sampling/importance_sampling_ratio/mean" in log
    assert is_corrected == (settings in CORRECTED)
    assert log["grad_norm"] > 0
