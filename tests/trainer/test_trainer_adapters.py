"""The real TRL trainer with `peft_config`: both engines, the reference model, seeds, sleep."""

import pytest
import torch
from adapted import LINEAR
from peft import LoraConfig
from trainers import GAP, REWARDS, TOOLS
from transformers import AutoModelForCausalLM

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR)


@pytest.fixture
def make_trainer(new_trainer):
    def make(engine, **changes):
        return new_trainer(
            engine, max_turns=4, reward_funcs=REWARDS, tools=TOOLS, **{"max_steps": 2, **changes}
        )

    return make


@pytest.mark.parametrize("engine", ["torch", pytest.param("own vllm", marks=pytest.mark.vllm)])
def test_lora_trains_with_the_adapter_disabled_as_reference(make_trainer, engine):
    trainer = make_trainer(
        engine, peft_config=LORA, max_steps=2, beta=0.05, learning_rate=1e-2,
    )  # fmt: skip
    base = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    log = trainer.state.log_history
    assert max(entry["sampling/logprob_gap/max"] for entry in log[:2]) <= GAP
    assert log[0]["kl"] == pytest.approx(0.0, abs=1e-4) and log[1]["kl"] > 1e-4
    now = dict(trainer.model.named_parameters())
    assert all(torch.equal(value, now[name]) for name, value in base.items())
    adapter_bytes = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    assert log[1]["rollout/sync_bytes"] == (0 if engine == "torch" else adapter_bytes)


def test_the_same_seed_makes_the_same_adapter(make_trainer, agent_path):
    made = []
    for seed in (7, 7, 8):
        model = AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32")
        trainer = make_trainer("torch", model=model, peft_config=LORA, seed=seed)
        made.append({n: p.clone() for n, p in trainer.model.named_parameters() if "lora_A" in n})
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert not any(torch.equal(made[0][name], made[2][name]) for name in made[0])


def test_sleep_mode_is_refused_where_nothing_could_sleep(make_trainer):
    with pytest.raises(ValueError, match="is for an engine that the trainer builds"):
        make_trainer("torch", vllm_enable_sleep_mode=True)


@pytest.mark.vllm
def test_sleep_mode_is_refused_on_a_cpu_with_vllms_reason(make_trainer):
    with pytest.raises(ValueError, match="not supported on this platform"):
        make_trainer("own vllm", vllm_enable_sleep_mode=True)
