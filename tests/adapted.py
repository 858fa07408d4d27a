"""Learners with PEFT adapters that already do something, for the tests."""

from peft import LoraConfig, get_peft_model

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(model, **changes):
    """The model with LoRA on all linear layers, initialised to a visible change."""
    config = {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**{**config, **changes}))
