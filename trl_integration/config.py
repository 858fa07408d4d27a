"""Define AgentGRPOConfig: TRL's `GRPOConfig` and the settings of multi-turn rollouts."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl.trainer.grpo_config import GRPOConfig

from agent_vllm.settings import Limits, SamplingParams
from trl_integration.generation_kwargs import settings_of

OLD_LOGPROBS = ("sampler", "recomputed")
ON_ENGINE_DEATH = ("stop", "rebuild")
ON_WARNING = ("warn", "stop")
SYNC_WEIGHTS = ("after_step", "before_rollout")
SHARED_PREFIX = ("auto", "on", "off")

_CHOICES = {
    "old_logprobs": OLD_LOGPROBS,
    "on_engine_death": ON_ENGINE_DEATH,
    "on_warning": ON_WARNING,
    "sync_weights": SYNC_WEIGHTS,
    "shared_prefix": SHARED_PREFIX,
}


@dataclass
class AgentGRPOConfig(GRPOConfig):
    """
    Configuration class for the [`AgentGRPOTrainer`]: all of [`~trl.GRPOConfig`], and the parameters below.

    `max_completion_length` bounds a whole trajectory, sampled and observed tokens together, as it does in TRL's own
    tool loop; `max_tool_calling_iterations` bounds its tool rounds. Keys of `generation_kwargs` set the parameter of
    their name (`stop` sets `stop_strings`, `max_tokens` sets `max_new_tokens`); others are refused.

    Parameters:
        max_turns (`int`, *optional*):
            Assistant turns of a trajectory. If `None`, there is no limit, as in TRL.
        max_new_tokens (`int`, *optional*):
            Sampled tokens of one turn. If `None`, a turn may use what is left of `max_completion_length`.
        max_tool_result_tokens (`int`, *optional*):
            Tokens of one tool result; longer ones are cut and marked.
        max_invalid_calls (`int`, *optional*):
            Calls in a row that could not run before the trajectory is ended.
        tool_timeout_s (`float`, *optional*):
            Seconds for one tool call. If `None`, 30 s, or less where a deadline is tighter; `inf` means no limit.
        turn_deadline_s (`float`, *optional*):
            Seconds for one turn, tools included. If sampling takes longer, the trajectory ends; calls that take longer
            are answered as timed out.
        deadline_s (`float`, *optional*):
            Seconds from the start of a rollout until every trajectory must have ended. A straggler ends with the turns
            that it has, which are trained like any other's.
        fresh_environments (`bool`, *optional*, defaults to `False`):
            Whether each trajectory gets a new instance of its environment. By default instances are reset and reused, as
            in TRL.
        environment_timeout_s (`float`, *optional*, defaults to `120.0`):
            Seconds for building an environment, for its `reset` and for its `get_reward`, each. If one takes longer, only
            its trajectory fails.
        thinking_ratio (`float`, *optional*):
            Share of trajectories that are sampled with the chat template's thinking switch on. If `None`, the switch
            is left alone.
        stop_strings (`list[str]`, *optional*):
            Strings that end a turn, beside the end tokens. The tokens that spell one are kept and trained.
        escape_tool_results (`bool`, *optional*, defaults to `True`):
            Whether control tokens that a tool result spells stay text. If `False`, a tool result can end its own turn,
            open others and forge calls.
        old_logprobs (`str`, *optional*, defaults to `"sampler"`):
            Where the old log-probabilities of the ratio come from. `"sampler"`: the engine's own, at no cost.
            `"recomputed"`: a forward pass of the learner, with TRL's importance-sampling correction for the distance
            to the engine's (the `vllm_importance_sampling_*` parameters apply).
        shared_prefix (`str`, *optional*, defaults to `"auto"`):
            Whether the learner computes the tokens that rows share once: prompts, tool schemas and whole turns. The loss
            and its gradients are those of the rows. `"auto"`: where the model allows it and the first batch agrees with
            the rows. `"on"`: the same, but an error that says why where it can't be. `"off"`: row by row, as TRL does.
            See `docs/learner_step.md`.
        rollout_engine_kwargs (`dict` or `str`, *optional*):
            Keyword arguments of the engine that the trainer builds, such as `{"max_num_seqs": 64}`.
        sync_weights (`str`, *optional*, defaults to `"after_step"`):
            When the learner's weights are synced to the engine. `"after_step"`: after every optimizer step.
            `"before_rollout"`: only once a rollout needs them, which saves the syncs that no rollout sees where
            `steps_per_generation` or `num_iterations` is above 1. Every rollout is sampled with the current weights
            either way, and each optimizer step counts as a version. An engine that sleeps between rollouts
            (`vllm_enable_sleep_mode`) is always synced before a rollout.
        on_engine_death (`str`, *optional*, defaults to `"stop"`):
            What to do when the engine hangs or fails for good. `"stop"`: save a checkpoint and raise an error that says
            how to resume. `"rebuild"`: build a new engine from the learner's weights and go on, at most 3 times in a
            row. An engine in the trainer's process shares memory and GPU with the learner, so what broke it may have
            damaged the learner too; a new process from a checkpoint is safe, so `"stop"` is the default. An engine that
            you built is never rebuilt.
        max_logprob_gap (`float`, *optional*):
            Largest mean difference, in nats, between the engine's and the learner's logprobs with which a rollout is
            trained; a single token may be 25 times as far. Both hold the same weights when it is measured. If `None`,
            0.01 where both compute in float32, 0.2 otherwise, and no limit with `top_p`, `top_k` or `min_p`; `inf` means
            no limit.
        on_warning (`str`, *optional*, defaults to `"warn"`):
            What to do when a run seems to learn nothing, such as one whose tool always fails. `"warn"`: print it, once
            per cause. `"stop"`: raise an error. `docs/faults.md` lists the causes.
        record_rollouts (`bool`, *optional*, defaults to `False`):
            Whether to write every trajectory to `output_dir/rollouts.jsonl`.
        rollout_progress (`bool`, *optional*, defaults to `True`):
            Whether to show the progress of rollouts, on the main process.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *GRPOConfig._VALID_DICT_FIELDS,
        "rollout_engine_kwargs",
    ]

    max_turns: int | None = field(
        default=None, metadata={"help": "Assistant turns of a trajectory."}
    )
    max_new_tokens: int | None = field(
        default=None, metadata={"help": "Sampled tokens of one turn."}
    )
    max_tool_result_tokens: int | None = field(
        default=None,
        metadata={"help": "Tokens of one tool result; longer ones are cut and marked."},
    )
    max_invalid_calls: int | None = field(
        default=None,
        metadata={"help": "Calls in a row that could not run before the trajectory is ended."},
    )
    tool_timeout_s: float | None = field(
        default=None,
        metadata={"help": "Seconds for one tool call; 30 if not set, inf for no limit."},
    )
    turn_deadline_s: float | None = field(
        default=None, metadata={"help": "Seconds for one turn, tools included."}
    )
    deadline_s: float | None = field(
        default=None,
        metadata={
            "help": "Seconds from the start of a rollout until all its trajectories have ended."
        },
    )
    fresh_environments: bool = field(
        default=False, metadata={"help": "Each trajectory gets a new instance of its environment."}
    )
    environment_timeout_s: float | None = field(
        default=120.0,
        metadata={
            "help": "Seconds for building an environment, its `reset` and its `get_reward`, each."
        },
    )
    thinking_ratio: float | None = field(
        default=None,
        metadata={"help": "Share of trajectories sampled with the template's thinking switch on."},
    )
    stop_strings: list[str] | None = field(
        default=None, metadata={"help": "End a turn once its text has one of them."}
    )
    escape_tool_results: bool = field(
        default=True,
        metadata={"help": "Control tokens that a tool result spells stay text."},
    )
    old_logprobs: str = field(
        default="sampler",
        metadata={
            "help": "Where the ratio's old log-probabilities come from.",
            "choices": list(OLD_LOGPROBS),
        },
    )
    shared_prefix: str = field(
        default="auto",
        metadata={
            "help": "Whether the learner computes the tokens that rows share once.",
            "choices": list(SHARED_PREFIX),
        },
    )
    rollout_engine_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments of the engine that the trainer builds."}
    )
    sync_weights: str = field(
        default="after_step",
        metadata={
            "help": "When the learner's weights are synced to the engine.",
            "choices": list(SYNC_WEIGHTS),
        },
    )
    on_engine_death: str = field(
        default="stop",
        metadata={
            "help": "What to do when the engine is dead.",
            "choices": list(ON_ENGINE_DEATH),
        },
    )
    max_logprob_gap: float | None = field(
        default=None,
        metadata={"help": "Mean gap in nats between engine and learner with which is trained."},
    )
    on_warning: str = field(
        default="warn",
        metadata={
            "help": "What to do when the run seems to learn nothing.",
            "choices": list(ON_WARNING),
        },
    )
    record_rollouts: bool = field(
        default=False,
        metadata={"help": "Write every trajectory to `output_dir/rollouts.jsonl`."},
    )
    rollout_progress: bool = field(
        default=True, metadata={"help": "Show the progress of rollouts, on the main process."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.generation_kwargs, dict):  # text of a command line was read by TRL
            for name, value in settings_of(self.generation_kwargs).items():
                self._set_once(name, value)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` must be one of {choices}, got {getattr(self, name)!r}.")
        if self.thinking_ratio is not None and not 0 <= self.thinking_ratio <= 1:
            raise ValueError(f"`thinking_ratio` must be in [0, 1], got {self.thinking_ratio}.")
        if self.max_logprob_gap is not None and not self.max_logprob_gap > 0:
            raise ValueError(
                f"`max_logprob_gap` must be more than 0, got {self.max_logprob_gap}. Use inf for no "
                "limit."
            )
        if self.environment_timeout_s is not None and self.environment_timeout_s <= 0:
            raise ValueError(
                f"`environment_timeout_s` must be more than 0, got {self.environment_timeout_s}. "
                "Use None for no limit."
            )
        self._check_sampling()
        num_rounds, num_turns = self.max_tool_calling_iterations, self.max_turns
        if num_rounds is not None and num_turns is not None and num_rounds > num_turns:
            raise ValueError(
                f"`max_tool_calling_iterations` must be at most `max_turns`, got {num_rounds} and "
                f"{num_turns}: it can't be reached. Lower it, or raise `max_turns`."
            )
        try:
            self.limits()
        except ValueError as error:  # it names TRL's setting in its own way
            message = str(error).replace("max_completion_tokens", "max_completion_length")
            raise ValueError(message) from None

    def _set_once(self, name: str, value: Any) -> None:
        current, default = getattr(self, name), self.__dataclass_fields__[name].default
        if current not in (default, value):
            raise ValueError(
                f"`{name}` must be set once, got {current!r}, and {value!r} by `generation_kwargs`. "
                "Leave one out."
            )
        setattr(self, name, value)

    def _check_sampling(self) -> None:
        if not self.temperature:
            raise ValueError(
                f"`temperature` must be 0.01 or more, got {self.temperature}. The samples of a group "
                "must differ, and the loss divides by it."
            )
        SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            stop_strings=self.stop_strings or (),
        )

    def limits(self) -> Limits:
        """Return the limits of every trajectory."""
        return Limits(
            max_turns=self.max_turns,
            max_new_tokens=self.max_new_tokens,
            max_completion_tokens=self.max_completion_length,
            max_tool_rounds=self.max_tool_calling_iterations,
            max_invalid_calls=self.max_invalid_calls,
            max_tool_result_tokens=self.max_tool_result_tokens,
            tool_timeout_s=self.tool_timeout_s,
            turn_deadline_s=self.turn_deadline_s,
            deadline_s=self.deadline_s,
        )
