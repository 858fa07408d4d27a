"""What the trainer refuses, as early as it can be told: arguments first, then the set-up.

Invariant: what is not supported raises with a reason and a remedy; nothing is silently ignored.
"""

from typing import Any

from datasets import Dataset

from agent_vllm.engines import ENGINE_NAMES, RolloutEngine
from agent_vllm.engines.vllm import check_sleep_mode
from trl_integration.config import AgentGRPOConfig


def check_arguments(args: Any, model: Any, rollout_engine: Any, kwargs: dict[str, Any]) -> None:
    """What can be refused before anything heavy is built."""
    if not isinstance(args, AgentGRPOConfig):
        raise TypeError(
            f"`args` must be an `AgentGRPOConfig`, got {type(args).__name__}. It takes every "
            "argument of `GRPOConfig`: change the class name."
        )
    if not isinstance(rollout_engine, RolloutEngine) and rollout_engine not in ENGINE_NAMES:
        raise ValueError(
            f"`rollout_engine` must be one of {ENGINE_NAMES} or a `RolloutEngine`, got "
            f"{rollout_engine!r}."
        )
    if kwargs.get("rollout_func") is not None:
        raise ValueError("`rollout_func` is refused: the rollout engine makes the rollouts.")
    if args.vllm_enable_sleep_mode:
        if rollout_engine != "vllm":
            raise ValueError(
                "`vllm_enable_sleep_mode=True` is for the vLLM engine that the trainer builds, got "
                f'rollout_engine={rollout_engine!r}. Leave it out, or use rollout_engine="vllm".'
            )
        check_sleep_mode()
    if args.use_vllm:
        raise ValueError(
            "`use_vllm=True` starts TRL's own vLLM. Leave it out and pass "
            'rollout_engine="vllm" to the trainer.'
        )
    if args.repetition_penalty != 1.0 or args.generation_kwargs:
        raise ValueError(
            "`repetition_penalty` and `generation_kwargs` are refused: the learner can't reproduce "
            "the distribution that they sample from."
        )


def check_datasets(
    train_dataset: Any, eval_dataset: Any, *, needs_prompt: bool
) -> dict[str, Dataset]:
    """
    What can be seen of datasets that can be looked into.

    Args:
        needs_prompt: whether nothing else than a column gives the prompts.

    Returns:
        `dict[str, Dataset]`: those datasets, by the argument that gave them.
    """
    datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    if isinstance(eval_dataset, dict):
        del datasets["eval_dataset"]
        datasets |= {f"eval_dataset[{key!r}]": value for key, value in eval_dataset.items()}
    seen = {name: value for name, value in datasets.items() if isinstance(value, Dataset)}
    for name, dataset in seen.items():
        _check_dataset(name, dataset, needs_prompt)
    return seen


def _check_dataset(name: str, dataset: Dataset, needs_prompt: bool) -> None:
    if len(dataset) == 0:
        raise ValueError(f"`{name}` is empty; it needs at least one row.")
    images = [column for column in ("image", "images") if column in dataset.column_names]
    if images:
        raise ValueError(
            f"`{name}` has a column {images[0]!r}, and rollouts are text only. Remove the column."
        )
    if "prompt" not in dataset.column_names:
        if not needs_prompt:
            return
        raise ValueError(
            f"`{name}` must have a column 'prompt', got {dataset.column_names}. Rename the column "
            "that holds the conversations."
        )
    if not isinstance(dataset[0]["prompt"], list):
        raise ValueError(
            f"`{name}` must have conversational prompts (lists of messages), got "
            f"{type(dataset[0]['prompt']).__name__}. Use "
            '[{"role": "user", "content": ...}].'
        )


def check_setup(trainer: Any) -> None:
    """What is known only once TRL has set itself up."""
    if trainer._is_vlm:
        raise ValueError("Vision-language models are not supported: rollouts are text only.")
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)  # absent without FSDP
    if plugin is not None and plugin.fsdp_version == 1:
        raise ValueError(
            "FSDP1 is not supported: it holds a layer's weights as one flat tensor, which can't be "
            "gathered one by one. Set `fsdp_version: 2` in accelerate's config."
        )
    is_neutral = trainer.top_p == 1.0 and not trainer.top_k and not trainer.min_p
    if not is_neutral:
        trainer.accelerator.print(
            "Warning: `top_p`, `top_k` or `min_p` cut off the distribution that is sampled from; "
            "the engine's logprobs are of what is left, the learner's of all tokens."
        )
