"""What TRL's settings and arguments do here: obeyed as in TRL, or refused by name with a way."""

import re

import fakes
import pytest
from datasets import Dataset
from hermes import RESPONSE_TEMPLATE
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from agent_vllm.testing import ScriptedRolloutEngine
from trl_integration import AgentGRPOConfig, AgentGRPOTrainer

VESPO = {"loss_type": "vespo", "beta": 0.0}


@pytest.fixture
def parts(tmp_path):
    """Return arguments for both stock TRL and the trainer here, and settings for a CPU."""
    tokenizer = fakes.chatml_tokenizer()
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
    unused = "`vllm_importance_sampling_mode` has no effect: it needs `old_logprobs="
    is_sequence = settings.get("vllm_importance_sampling_mode") == "sequence_truncate"
    assert (unused in capsys.readouterr().out) == is_sequence
    is_corrected = "sampling/importance_sampling_ratio/mean" in log
    assert is_corrected == (settings in CORRECTED)
    assert log["grad_norm"] > 0


# ---- sampling ----


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0), ("temperature", 0.001), ("top_k", -1), ("top_p", 0.0), ("min_p", 2.0)],
)
def test_a_sampling_setting_that_no_request_can_have_is_refused_by_name(parts, name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be .*got {value}"):
        AgentGRPOConfig(**parts[1], **{name: value})


def test_generation_kwargs_set_the_settings_of_their_names(parts):
    given = {"stop": "END", "max_tokens": 3, "top_p": 0.9, "min_tokens": 0, "do_sample": True}
    args = AgentGRPOConfig(**parts[1], generation_kwargs=given)
    assert (args.stop_strings, args.max_new_tokens, args.top_p) == (["END"], 3, 0.9)


@pytest.mark.parametrize(
    ("key", "value", "way"),
    [
        ("seed", 1, "Set the config's `seed`"),
        ("n", 4, "Set `num_generations`"),
        ("max_length", 10, "Set `max_completion_length`"),
        ("stop_token_ids", [3], "Pass `chat_format="),
        ("do_sample", False, "must differ"),
        ("min_tokens", 2, "could not reproduce"),
        ("presence_penalty", 0.5, "could not reproduce"),
        ("best_of", 2, "Leave it out"),
    ],
)
def test_other_keys_of_generation_kwargs_are_refused_with_the_way_that_exists(
    parts, key, value, way
):
    message = rf"must not have the key '{key}', got {re.escape(repr(value))}\. .*{way}"
    with pytest.raises(ValueError, match=message):
        AgentGRPOConfig(**parts[1], generation_kwargs={key: value})


def test_a_key_and_a_setting_that_differ_are_refused(parts):
    with pytest.raises(ValueError, match=r"`max_new_tokens` must be set once, got 2, and 3 by"):
        AgentGRPOConfig(**parts[1], max_new_tokens=2, generation_kwargs={"max_tokens": 3})


@pytest.mark.parametrize("key", ["setting", "generation_kwargs"])
def test_a_repetition_penalty_is_refused(parts, key):
    arguments, common = parts
    penalty = {"repetition_penalty": 1.2}
    args = AgentGRPOConfig(
        **common, **(penalty if key == "setting" else {"generation_kwargs": penalty})
    )
    with pytest.raises(ValueError, match=r"`repetition_penalty` must be left at 1\.0, got 1\.2"):
        AgentGRPOTrainer(**arguments, args=args, rollout_engine="torch")


# ---- as in TRL ----


def look() -> str:
    """Look around."""
    return "a wall"


class Maze:
    def reset(self, **columns):
        self.num_steps = 0

    def step(self) -> str:
        """Make a step."""
        self.num_steps += 1
        return "dark"

    def get_reward(self):
        return float(self.num_steps)


def test_turns_have_no_limit_by_default(parts):
    arguments, common = parts
    common["max_completion_length"] = 4000
    turns = [fakes.call("look")] * 40 + ["done"]  # shared by two trajectories
    trainer = AgentGRPOTrainer(
        **arguments,
        args=AgentGRPOConfig(**common),
        tools=[look],
        rollout_engine=ScriptedRolloutEngine(arguments["processing_class"], turns),
    )
    trainer._generate_and_score_completions([arguments["train_dataset"][0]] * 2)
    assert [t.stop_reason for t in trainer.trajectories] == ["answered"] * 2
    assert sum(t.num_turns for t in trainer.trajectories) == 42
    trainer.close()


def test_more_tool_rounds_than_turns_are_refused(parts):
    message = "`max_tool_calling_iterations` must be at most `max_turns`, got 8 and 4"
    with pytest.raises(ValueError, match=message):
        AgentGRPOConfig(**parts[1], max_turns=4, max_tool_calling_iterations=8)


def test_tools_and_reward_functions_are_those_of_trl(parts):
    arguments, common = parts
    arguments["processing_class"].response_template = RESPONSE_TEMPLATE  # for TRL's own parser
    trainer = AgentGRPOTrainer(
        **arguments, args=AgentGRPOConfig(**common), tools=[look], environment_factory=Maze,
        rollout_engine="torch",
    )  # fmt: skip
    stock = GRPOTrainer(
        **arguments, args=GRPOConfig(**common), tools=[look], environment_factory=Maze
    )
    names = [tool.__name__ for tool in stock.tools]
    assert [tool.__name__ for tool in trainer.tools] == names == ["look", "step"]
    mazes = [Maze(), Maze()]
    for maze in mazes:
        maze.reset()
    mazes[1].step()
    for reward in (stock.reward_funcs[-1], trainer.reward_funcs[-1]):
        assert reward(environments=mazes) == [0.0, 1.0]
    assert trainer.reward_funcs[0](completions=["a", "b"]) == [0.0, 1.0]
    trainer.close()


@pytest.mark.parametrize(
    "name",
    ["_generate_single_turn", "_tool_call_loop", "_tokenize_prompts", "_get_tool_suffix_ids"],
)
def test_a_method_that_is_never_called_can_not_be_overridden(name):
    own = type("Own", (), {name: lambda self, *args: None})
    message = rf"`Mine` must not override `{name}`, got one in `(Own|Mine)`.* Pass "
    with pytest.raises(TypeError, match=message):
        type("Mine", (AgentGRPOTrainer,), dict(vars(own)))
    with pytest.raises(TypeError, match=message):
        type("Mine", (own, AgentGRPOTrainer), {})


def test_a_dataset_that_can_not_fill_a_batch_is_refused_with_both_numbers(parts):
    arguments, common = parts
    args = AgentGRPOConfig(**{**common, "per_device_train_batch_size": 8, "num_generations": 2})
    trainer = AgentGRPOTrainer(**arguments, args=args, rollout_engine="torch")
    with pytest.raises(ValueError, match=r"at least 4 rows, got 2: .* 8 samples, 2 per prompt"):
        trainer.train()
    trainer.close()


def test_a_key_among_the_arguments_would_be_logged_and_is_refused(parts):
    arguments, common = parts
    args = AgentGRPOConfig(**common, rollout_engine_kwargs={"api_key": "sk-1"})
    with pytest.raises(ValueError, match=r"must not hold an `api_key`.*VLLM_API_KEY") as refused:
        AgentGRPOTrainer(**arguments, args=args, rollout_engine="vllm-server")
    assert "sk-1" not in str(refused.value)
