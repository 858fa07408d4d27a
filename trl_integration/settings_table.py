"""Say of every setting of TRL's config what becomes of it here.

Owns the table, the refusals and the warnings that follow from it, and its form for `docs/settings.md`.
Invariant: each field that [`~trl.GRPOConfig`] adds to [`~transformers.TrainingArguments`] is in the
table. Fields of the latter that are not are obeyed by transformers itself.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agent_vllm.engines import ENGINE_NAMES, RolloutEngine
from trl_integration.config import AgentGRPOConfig


class Treatment(StrEnum):
    OBEYED = "obeyed"
    REFUSED = "refused"  # unless it is left at its default
    NO_EFFECT = "no effect"  # a warning says so


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """
    Say what becomes of a setting that is not left at its default.

    Attributes:
        note: what differs from TRL if it is obeyed, the remedy if it is refused, or why it has no effect.
        engines: the trainer must build one of these engines; empty for any engine, also one that the user built.
        only_if: a setting and the value without which this one has no effect.
    """

    treatment: Treatment = Treatment.OBEYED
    note: str = ""
    engines: tuple[str, ...] = ()
    only_if: tuple[str, str] | None = None


def _refused(note: str) -> Setting:
    return Setting(treatment=Treatment.REFUSED, note=note)


def _no_effect(note: str) -> Setting:
    return Setting(treatment=Treatment.NO_EFFECT, note=note)


_AS_IN_TRL = (
    "model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "disable_dropout",
    "num_generations", "num_generations_eval", "shuffle_dataset", "pad_to_multiple_of",
    "generation_batch_size", "steps_per_generation", "chat_template_kwargs", "beta", "num_iterations",
    "epsilon", "epsilon_high", "delta", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos",
    "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "importance_sampling_level",
    "reward_weights", "multi_objective_aggregation", "scale_rewards", "loss_type", "sync_ref_model",
    "ref_model_mixup_alpha", "ref_model_sync_steps", "top_entropy_quantile", "entropy_coef",
    "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta",
    "entropy_target", "off_policy_mask_threshold", "use_bias_correction_kl", "log_completions",
    "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo",
)  # fmt: skip

_WITH_CORRECTION = Setting(
    note='With `old_logprobs="recomputed"`, as in TRL.', only_if=("old_logprobs", "recomputed")
)
_BASE_URLS = _refused("Pass `rollout_engine_kwargs={'base_urls': [...]}`.")
_OWN_ROWS = "Rollouts are batched by prompt, in the order of TRL's own sampler."
_NO_GENERATE = "The rollout engine samples, not transformers. Leave it out."

SETTINGS: Mapping[str, Setting] = {
    **dict.fromkeys(_AS_IN_TRL, Setting()),
    # ---- sampling ----
    "max_completion_length": Setting(note="Bounds a whole trajectory, as in TRL's tool loop."),
    "max_tool_calling_iterations": Setting(note="Bounds a trajectory's tool rounds."),
    "temperature": Setting(note="Must be 0.01 or more."),
    "top_p": Setting(
        note="Cuts the distribution that the engine's logprobs are of; a warning says so."
    ),
    "top_k": Setting(note="As `top_p`."),
    "min_p": Setting(note="As `top_p`."),
    "generation_kwargs": Setting(note="Each key is obeyed or refused by name."),
    "repetition_penalty": _refused(
        "The learner can't reproduce the distribution that it samples from. Leave it out."
    ),
    "mask_truncated_completions": Setting(note="The stop reason tells what was truncated."),
    # ---- engines ----
    "use_vllm": _refused(
        'It starts TRL\'s own vLLM. Leave it out and pass `rollout_engine="vllm"`.'
    ),
    "vllm_mode": _refused('Choose with `rollout_engine="vllm"` or `"vllm-server"`.'),
    "vllm_model_impl": _refused(
        "Pass `rollout_engine_kwargs={'engine_args': {'model_impl': ...}}`, or start the server with it."
    ),
    "vllm_enable_sleep_mode": Setting(note="Needs a GPU.", engines=("vllm",)),
    "vllm_structured_outputs_regex": _refused(
        "The learner can't reproduce the distribution that it samples from. Leave it out."
    ),
    "vllm_server_base_url": _BASE_URLS,
    "vllm_server_host": _BASE_URLS,
    "vllm_server_port": _BASE_URLS,
    "vllm_server_timeout": _refused("Start the servers before the trainer. Leave it out."),
    "vllm_group_port": _refused("Pass `rollout_engine_kwargs={'group_port': ...}`."),
    "vllm_gpu_memory_utilization": Setting(note="Bounds nothing without a GPU.", engines=("vllm",)),
    "vllm_max_model_length": Setting(note="The engine's `max_model_len`.", engines=ENGINE_NAMES),
    "vllm_tensor_parallel_size": _refused(
        'Start servers with `--tensor-parallel-size` and use `rollout_engine="vllm-server"`.'
    ),
    "rollout_engine_kwargs": Setting(engines=ENGINE_NAMES),
    "use_transformers_continuous_batching": _refused(_NO_GENERATE),
    "transformers_continuous_batching_config": _refused(_NO_GENERATE),
    "use_transformers_paged": _refused(_NO_GENERATE),
    "cache_implementation": _refused(_NO_GENERATE),
    "ds3_gather_for_generation": _no_effect(
        "A sharded learner's weights are gathered one at a time, whatever it says."
    ),
    # ---- the ratio ----
    "vllm_importance_sampling_correction": Setting(note='With `old_logprobs="recomputed"`.'),
    "vllm_importance_sampling_mode": _WITH_CORRECTION,
    "vllm_importance_sampling_clip_max": _WITH_CORRECTION,
    "vllm_importance_sampling_clip_min": _WITH_CORRECTION,
    "vllm_importance_sampling_cap": _WITH_CORRECTION,
    # ---- the learner ----
    "cast_lm_head_to_fp32": Setting(note="Refused where the engine's head would be rounded."),
    "log_multimodal": _no_effect("Rollouts are text only."),
    # ---- fields of `TrainingArguments` that are not obeyed as they are ----
    "parallelism_config": Setting(note="Data parallel dimensions only."),
    "label_smoothing_factor": _no_effect("GRPO's loss has no labels."),
    "train_sampling_strategy": _no_effect(_OWN_ROWS),
    "length_column_name": _no_effect(_OWN_ROWS),
}


def check_settings(args: AgentGRPOConfig, engine: str | RolloutEngine) -> None:
    """
    Refuse a setting that can't be obeyed, or not by this engine.

    Args:
        engine: the trainer's `rollout_engine`.

    Raises:
        ValueError: names the setting, its value and the remedy.
    """
    for name, (value, default) in _changed(args).items():
        setting = SETTINGS.get(name, Setting())
        if setting.treatment is Treatment.REFUSED:
            raise ValueError(f"`{name}` must be left at {default!r}, got {value!r}. {setting.note}")
        if setting.engines and not (isinstance(engine, str) and engine in setting.engines):
            chosen = engine if isinstance(engine, str) else type(engine).__name__
            raise ValueError(
                f"`{name}` is for an engine that the trainer builds, one of {setting.engines}; it "
                f"must be left at {default!r} with rollout_engine={chosen!r}, got {value!r}. "
                "Leave it out."
            )


def settings_without_effect(args: AgentGRPOConfig) -> list[str]:
    """Return a sentence about each setting that was set and has no effect."""
    return [
        f"`{name}` has no effect: {why}"
        for name in _changed(args)
        if (why := _why_no_effect(args, SETTINGS.get(name, Setting())))
    ]


def _why_no_effect(args: AgentGRPOConfig, setting: Setting) -> str | None:
    if setting.treatment is Treatment.NO_EFFECT:
        return setting.note
    if setting.only_if is None:
        return None
    name, value = setting.only_if
    current = getattr(args, name)
    return None if current == value else f'it needs `{name}="{value}"`, got {current!r}.'


def _changed(args: AgentGRPOConfig) -> dict[str, tuple[Any, Any]]:
    """Return the values and the defaults of the settings that are not at their defaults."""
    values = {
        field.name: (getattr(args, field.name), field.default) for field in dataclasses.fields(args)
    }
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def as_markdown() -> str:
    """Return the table as `docs/settings.md` has it."""
    lines = ["| setting | here | |", "|---|---|---|"]
    for name, setting in sorted(SETTINGS.items()):
        note = setting.note
        if setting.engines:
            built = ", ".join(f'`"{engine}"`' for engine in setting.engines)
            note = f"{note} For an engine that the trainer builds: {built}.".strip()
        lines.append(f"| `{name}` | {setting.treatment} | {note} |")
    return "\n".join(lines) + "\n"
