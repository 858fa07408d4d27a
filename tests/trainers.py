"""Real trainers for tests: quick settings on a CPU, the tiny agent's tools, data and rewards."""

import math

from datasets import Dataset
from tiny_tasks import (
    SMALL_KINDS,
    calculator,
    correct_reward,
    format_reward,
    get_price,
    get_weather,
    make_tasks,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_vllm.testing import ScriptedRolloutEngine
from trl_integration import AgentGRPOConfig, AgentGRPOTrainer

TOOLS = [calculator, get_weather, get_price]
REWARDS = [correct_reward, format_reward]
GAP = 5e-5  # against TRL's own chunked forward; against a plain one see agreement.py


def rows(num_rows=16, split="train"):
    return Dataset.from_list(make_tasks(split, num_rows, kinds=SMALL_KINDS))


def fresh(agent_path):
    """A copy of the agent: model and tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32")
    return model, AutoTokenizer.from_pretrained(agent_path)


def config(folder, **settings):
    """Groups of four, two of them in a batch; nothing is reported or saved unless asked for."""
    return AgentGRPOConfig(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 120,
            "learning_rate": 5e-4,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            **settings,
        }
    )


def build(
    agent, folder, rollout_engine, /, *, trainer_class=AgentGRPOTrainer, args=None, **changes
):
    """Build a trainer; `changes` are settings of `config` and arguments of the trainer."""
    model, tokenizer = agent
    names = [name for name in changes if name in AgentGRPOConfig.__dataclass_fields__]
    settings = {name: changes.pop(name) for name in names}
    if isinstance(rollout_engine, ScriptedRolloutEngine):
        settings.setdefault("max_logprob_gap", math.inf)  # its logprobs are made up
    arguments = {
        "model": model,
        "processing_class": tokenizer,
        "train_dataset": rows(),
        "rollout_engine": rollout_engine,
        **changes,
    }
    return trainer_class(args=args or config(folder, **settings), **arguments)
