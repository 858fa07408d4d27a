"""Refuse unsupported settings as early as possible: arguments first, then datasets, then the set-up.

Invariant: what is not supported raises with a reason and a remedy; nothing is silently ignored.
"""

from collections.abc import Iterator, Sequence, Sized
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from agent_vllm.engines import ENGINE_NAMES, RolloutEngine
from agent_vllm.engines.vllm import check_engine_args, check_sleep_mode
from trl_integration.config import AgentGRPOConfig
from trl_integration.settings_table import check_settings, settings_without_effect

_CORRECTION_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

# Methods of TRL's trainers that are never called here, and what takes their place.
_NEVER_CALLED = {
    "_generate_single_turn": "Pass an engine of your own as `rollout_engine` (docs/engines.md).",
    "_get_tool_suffix_ids": "Pass a `chat_format` of your own.",
    "_tokenize_prompts": "Pass a `chat_format` of your own.",
    "_tool_call_loop": "Pass `tools`, an `environment_factory` or a `user` (docs/coming_from.md).",
}


def check_overrides(trainer_class: type) -> None:
    """Refuse a trainer class with a method that TRL would call and this package never does."""
    for name, way in _NEVER_CALLED.items():
        owner = next((base for base in trainer_class.__mro__ if name in vars(base)), None)
        if owner is not None and owner.__module__.partition(".")[0] != "trl":
            raise TypeError(
                f"`{trainer_class.__name__}` must not override `{name}`, got one in "
                f"`{owner.__name__}`: rollout engines make the rollouts, and it is never called. {way}"
            )


def check_arguments(args: Any, model: Any, rollout_engine: Any, kwargs: dict[str, Any]) -> None:
    """Refuse what can be refused before anything heavy is built."""
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
        raise ValueError(
            "`rollout_func` is refused: the rollout engine makes the rollouts. Write a tool, an "
            "environment (docs/environments.md) or an engine (docs/engines.md)."
        )
    _check_gpus(args, model)
    check_settings(args, rollout_engine)
    if rollout_engine == "vllm":
        further = cast(dict[str, Any], args.rollout_engine_kwargs or {}).get("engine_args")
        check_engine_args(further or {}, is_checkpoint=False)
    if "api_key" in (args.rollout_engine_kwargs or ()):
        raise ValueError(
            "`rollout_engine_kwargs` must not hold an `api_key`: a trainer's arguments are logged and saved. "
            "Set VLLM_API_KEY instead."
        )
    if args.vllm_enable_sleep_mode:
        check_sleep_mode()
    _check_correction(args)


def _check_gpus(args: AgentGRPOConfig, model: Any) -> None:
    """Refuse several GPUs in one process: TRL refuses them too, once the model is loaded."""
    is_split = "device_map" in (args.model_init_kwargs or {}) or hasattr(model, "hf_device_map")
    if args.n_gpu > 1 and not is_split:
        raise ValueError(
            f"One GPU must be visible to each process, got {args.n_gpu}. Set CUDA_VISIBLE_DEVICES=0 "
            "for one process, or start one per GPU: `accelerate launch --num_processes "
            f"{args.n_gpu}`."
        )


def _check_correction(args: AgentGRPOConfig) -> None:
    """Refuse what TRL refuses of its correction: it looks where `use_vllm` is set, which is set after its constructor."""
    if args.old_logprobs != "recomputed" or not args.vllm_importance_sampling_correction:
        return
    mode, modes = args.vllm_importance_sampling_mode, _CORRECTION_MODES
    if args.loss_type == "vespo":  # it weights each token by the ratio
        modes = tuple(mode for mode in _CORRECTION_MODES if mode.startswith("token"))
    if mode not in modes:
        raise ValueError(
            f"`vllm_importance_sampling_mode` must be one of {modes} with "
            f'old_logprobs="recomputed" and loss_type="{args.loss_type}", got {mode!r}. Choose '
            'another, or use old_logprobs="sampler".'
        )


def check_datasets(
    train_dataset: Any, eval_dataset: Any, *, needs_prompt: bool, takes_text: bool
) -> dict[str, Dataset]:
    """
    Check the datasets whose rows can be read before training.

    Args:
        needs_prompt: whether only a column can give the prompts.
        takes_text: whether a prompt may be text.

    Returns:
        `dict[str, Dataset]`: those datasets, by the argument that gave them.
    """
    datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    if isinstance(eval_dataset, dict):
        del datasets["eval_dataset"]
        datasets |= {f"eval_dataset[{key!r}]": value for key, value in eval_dataset.items()}
    seen = {name: value for name, value in datasets.items() if isinstance(value, Dataset)}
    for name, dataset in seen.items():
        _check_columns(name, dataset, needs_prompt)
        if "prompt" in dataset.column_names:
            rows = {0, *_rows_without_prompt(dataset)} if needs_prompt else {0}
            for row in sorted(rows):
                check_prompt(
                    dataset[row]["prompt"], f"Row {row} of `{name}`", needs_prompt, takes_text
                )
    return seen


def _check_columns(name: str, dataset: Dataset, needs_prompt: bool) -> None:
    if len(dataset) == 0:
        raise ValueError(f"`{name}` is empty; it needs at least one row.")
    images = [column for column in ("image", "images") if column in dataset.column_names]
    if images:
        raise ValueError(
            f"`{name}` has a column {images[0]!r}, and rollouts are text only. Remove the column."
        )
    if needs_prompt and "prompt" not in dataset.column_names:
        raise ValueError(
            f"`{name}` must have a column 'prompt', got {dataset.column_names}. Rename the column "
            "that holds the conversations."
        )


def _rows_without_prompt(dataset: Dataset) -> Iterator[int]:
    """Yield the rows whose prompt is None or has no message, without reading the others' messages."""
    if dataset.format["type"] == "custom":  # a transform may write the prompts
        return
    first = 0
    tables = dataset.select_columns("prompt").with_format("arrow").iter(10_000)
    for table in cast(Iterator[pa.Table], tables):
        prompts = table["prompt"]
        sizes = prompts.is_valid()
        if pa.types.is_list(prompts.type) or pa.types.is_large_list(prompts.type):
            sizes = pc.call_function("list_value_length", [prompts]).fill_null(0)
        yield from (first + row for row, size in enumerate(sizes.to_pylist()) if not size)
        first += len(prompts)


def check_prompt(prompt: Any, owner: str, needs_prompt: bool, takes_text: bool) -> None:
    """
    Refuse a prompt that no rollout can begin with, wherever its row came from.

    Args:
        owner: names the row.
        needs_prompt: whether the row must have one.
        takes_text: whether it may be text.
    """
    if isinstance(prompt, str):
        if not takes_text:
            raise ValueError(
                f"{owner} must have a conversational prompt (a list of messages) where there are "
                "tools, an environment or a user, got str. Use conversational prompts: "
                '[{"role": "user", "content": ...}].'
            )
    elif isinstance(prompt, Sequence) and prompt:
        return
    elif prompt or needs_prompt:
        raise ValueError(
            f"{owner} must have a prompt with at least one message, got {prompt!r}. Remove the row."
        )


def check_batch_can_be_filled(
    train_dataset: Any, generation_batch_size: int, num_generations: int
) -> None:
    """Refuse a dataset with fewer prompts than a batch: TRL's sampler would drop all of them."""
    num_prompts = generation_batch_size // num_generations
    if isinstance(train_dataset, Sized) and len(train_dataset) < num_prompts:
        raise ValueError(
            f"`train_dataset` must have at least {num_prompts} rows, got {len(train_dataset)}: a "
            f"generation batch has {generation_batch_size} samples, {num_generations} per prompt. "
            "Add rows, or lower `per_device_train_batch_size` or `steps_per_generation`."
        )


def check_setup(trainer: Any) -> None:
    """Refuse what is known only once TRL has set itself up."""
    if trainer._is_vlm:
        raise ValueError("Vision-language models are not supported: rollouts are text only.")
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)  # absent without FSDP
    if plugin is not None and plugin.fsdp_version == 1:
        raise ValueError(
            "FSDP1 is not supported: it holds a layer's weights as one flat tensor, which can't be "
            "gathered one by one. Set `fsdp_version: 2` in accelerate's config."
        )
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.tp_enabled:
        raise ValueError(
            f"`tp_size` of the learner must be 1, got {parallelism.tp_size}. Ranks that share a model "
            "must train the same rows, and each rank's engine samples its own. Shard the learner by "
            "FSDP2 or ZeRO-3."
        )
    _warn_of_timeout(trainer)
    for sentence in settings_without_effect(trainer.args):
        trainer.accelerator.print(f"Warning: {sentence}")
    is_neutral = trainer.top_p == 1.0 and not trainer.top_k and not trainer.min_p
    if not is_neutral:
        trainer.accelerator.print(
            "Warning: `top_p`, `top_k` or `min_p` cut off the distribution that is sampled from; "
            "the engine's logprobs are of what is left, the learner's of all tokens."
        )


def _warn_of_timeout(trainer: Any) -> None:
    """Warn if a slow rollout of one process would end the run of all."""
    deadline_s, timeout_s = trainer.args.deadline_s, trainer.args.ddp_timeout
    if trainer.accelerator.num_processes > 1 and not (deadline_s and deadline_s < timeout_s):
        trainer.accelerator.print(
            "Warning: processes wait for the slowest one's rollout, and torch ends the run after "
            f"`ddp_timeout` = {timeout_s} s of waiting. Set `deadline_s` below it, or raise it."
        )
