"""Models with recurrent layers: sampled exactly by the torch engine, or refused by name."""

import pytest
import torch
import transformers
from agreement import TOLERANCE, gap
from transformers import AutoModelForCausalLM

from agent_vllm import TorchRolloutEngine, VLLMRolloutEngine
from agent_vllm.errors import UnsupportedModelError

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.05,
}  # fmt: skip
DELTA = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}  # fmt: skip
SAMPLED = {
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
    "Qwen3_5TextConfig": DELTA,
    "NemotronHConfig": {
        "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
        "n_groups": 2, "chunk_size": 8, "layers_block_type": ["mamba", "attention"],
    },
    "GraniteMoeHybridConfig": {
        **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 0,
        "shared_intermediate_size": 32,
    },
    "FalconH1Config": {**MAMBA, "head_dim": 8, "mamba_d_ssm": 32, "mamba_d_head": 8},
}  # fmt: skip
REFUSED = {
    "MambaConfig": "MambaForCausalLM in batches: its recurrent layers read padding",
    "MiniMaxConfig": "MiniMaxForCausalLM, which has recurrent layers: ValueError: MiniMax uses",
}


def hybrid(name, vocab_size, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, name)(vocab_size=vocab_size, **{**SIZES, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", SAMPLED)
def test_a_hybrid_model_is_sampled_exactly(name, tokenizer):
    """Rows of uneven lengths in one batch; some end before the others."""
    model = hybrid(name, len(tokenizer), **SAMPLED[name])
    with TorchRolloutEngine(model, tokenizer) as engine:
        assert gap(engine, model) <= TOLERANCE
        ids = torch.randint(5, 90, (3, 20), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[0, :11], mask[1, :4] = 0, 0
        result = engine.rollout(ids, mask, 4, 30, temperature=1.0)
    assert result.completion_mask.sum(1).unique().numel() > 1  # rows left the batch
    for row in range(12):
        prompt = ids[row // 4][mask[row // 4].bool()]
        sampled = result.completion_mask[row].bool()
        whole = torch.cat([prompt, result.completion_ids[row][sampled]])[None]
        with torch.no_grad():
            logprobs = model(input_ids=whole).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        own = logprobs.gather(1, whole[0, len(prompt) :, None])[:, 0]
        assert (own - result.per_token_logps[row][sampled]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_a_recurrent_model_that_cannot_be_batched_is_refused_by_name(name, tokenizer):
    model = hybrid(name, len(tokenizer))
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        TorchRolloutEngine(model, tokenizer, max_model_len=256)


@pytest.mark.vllm
def test_a_hybrid_model_is_sampled_exactly_by_vllm(tokenizer):
    """Attention and a recurrent state in every layer; without a prefix cache on a CPU."""
    sizes = {"hidden_size": 128, "head_dim": 32}
    model = hybrid("FalconH1Config", len(tokenizer), **{**SAMPLED["FalconH1Config"], **sizes})
    with VLLMRolloutEngine(model, tokenizer, max_model_len=128) as engine:
        assert gap(engine, model) <= TOLERANCE


@pytest.mark.vllm
def test_a_hybrid_model_that_vllm_cannot_build_is_refused_by_name(tokenizer):
    sizes = {"hidden_size": 128, "num_attention_heads": 4}
    model = hybrid("Lfm2Config", len(tokenizer), **{**SAMPLED["Lfm2Config"], **sizes})
    with pytest.raises(UnsupportedModelError, match=r"Lfm2ForCausalLM.*conv_dim.*torch engine"):
        VLLMRolloutEngine(model, tokenizer, max_model_len=128)
