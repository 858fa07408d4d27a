"""Trainers on several ranks, started by `accelerate launch`; stories leave files for test_ranks.py.

Usage: rank_stories.py FOLDER STORY...; every story has a folder of its own in FOLDER.
"""

import json
import math
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from datasets import Dataset
from tiny_agent import tiny_agent_path
from tiny_tasks import SMALL_KINDS, TOOLS, correct_reward, make_tasks
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_vllm import TorchRolloutEngine, VLLMRolloutEngine
from agent_vllm.errors import EngineError
from agent_vllm.testing import ScriptedRolloutEngine
from trl_integration import AgentGRPOConfig, AgentGRPOTrainer

RANK = PartialState(cpu=True).process_index
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "new_group",
    "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "send",
)  # fmt: skip


@contextmanager
def no_collectives():
    """Inside, to meet the other rank is an error."""

    def refuse(*_, **__):
        raise RuntimeError("a collective inside a rollout")

    modules = (dist, distributed_c10d)
    kept = {(m, name): getattr(m, name) for m in modules for name in COLLECTIVES}
    for module, name in kept:
        setattr(module, name, refuse)
    try:
        yield
    finally:
        for (module, name), function in kept.items():
            setattr(module, name, function)


class AloneInRollouts(AgentGRPOTrainer):
    """Meets nobody in a rollout, and leaves a file when one has ended."""

    num_rollouts = 0

    def _sample(self, rollout, prompts):
        with no_collectives():
            trajectories = super()._sample(rollout, prompts)
        Path(self.args.output_dir, f"rollout-{self.num_rollouts}-{RANK}").touch()
        self.num_rollouts += 1
        return trajectories


def agent():
    path = tiny_agent_path("small")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    return model, AutoTokenizer.from_pretrained(path)


def trainer(
    folder,
    engine,
    *,
    learner=None,
    data=None,
    evaluation=None,
    tools=TOOLS,
    reward=correct_reward,
    **settings,
):
    model, tokenizer = learner or agent()
    args = AgentGRPOConfig(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 6,
            "num_generations": 4,  # the second of three groups lies on both ranks
            "max_completion_length": 120,
            "max_turns": 5,
            "learning_rate": 5e-4,
            "lr_scheduler_type": "constant",
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            "record_rollouts": True,
            **settings,
        }
    )
    return AloneInRollouts(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=data or Dataset.from_list(make_tasks("train", 24, kinds=SMALL_KINDS)),
        eval_dataset=evaluation,
        processing_class=tokenizer,
        tools=tools,
        rollout_engine=engine,
    )


def finish(trainer, folder, **facts):
    trainer.close()
    facts |= {
        "log": trainer.state.log_history,
        "versions": trainer.rollout_engine.policy_version,
        "world_size": dist.get_world_size(),
        "weights": sum(whole(p).double().sum().item() for p in trainer.model.parameters()),
    }
    Path(folder, f"facts-{RANK}.json").write_text(json.dumps(facts))


def whole(parameter):
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


# ---- stories ----


def scripted(folder):
    """Rank 0 calls a tool one to three times a row, rank 1 never; one prompt's rows fail there."""
    learner = agent()
    tokenizer = learner[1]

    def look(marker: str) -> str:
        """Looks.

        Args:
            marker: Where.
        """
        deadline = time.monotonic() + 120  # rank 1 is done with its rollout before rank 0 goes on
        while not Path(folder, "rollout-0-1").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return f"seen {marker}" if Path(folder, "rollout-0-1").exists() else "rank 1 waits"

    def script(request):
        text = tokenizer.decode(request.prompt_ids)
        marker = text.split("marker ")[1].split("<")[0].split(".")[0]
        num_seen = text.count("seen ")
        if RANK == 1 and marker == "5":
            return EngineError("lost")
        wanted = 0 if RANK == 1 else 1 + int(marker) % 3
        if num_seen < wanted:
            call = json.dumps({"name": "look", "arguments": {"marker": marker}})
            return engine.encode_turn(f"<tool_call>\n{call}\n</tool_call>")
        return engine.encode_turn(f"marker {marker}." + " yes" * (request.seed % 7))

    def reward(completions, marker, **_):
        """Minus one for another row's completion; else longer is better."""
        answers = [completion[-1]["content"] if completion else "" for completion in completions]
        return [
            float(len(answer)) if f"marker {name}." in answer else -1.0
            for answer, name in zip(answers, marker, strict=True)
        ]

    engine = ScriptedRolloutEngine(tokenizer, script, max_model_len=1024)
    data = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"marker {i}."}], "marker": str(i)}
            for i in range(9)
        ]
    )
    run = trainer(
        folder,
        engine,
        learner=learner,
        data=data,
        tools=[look],
        reward=reward,
        max_steps=3,
        tool_timeout_s=150,
        old_logprobs="recomputed",
        max_logprob_gap=math.inf,  # the script's logprobs are made up
    )
    run.train()
    try:
        with no_collectives():
            dist.barrier()
        guard = "asleep"
    except RuntimeError as error:
        guard = str(error)
    finish(run, folder, guard=guard)


def torch_engine(folder):
    evaluation = Dataset.from_list(make_tasks("test", 5, kinds=SMALL_KINDS))
    run = trainer(
        folder,
        "torch",
        evaluation=evaluation,
        max_steps=2,
        per_device_eval_batch_size=4,
        num_generations_eval=2,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=2,
    )
    run.train()
    finish(run, folder)


def vllm_engine(folder, resume=None):
    run = trainer(folder, "vllm", max_steps=4, save_strategy="steps", save_steps=2)
    run.train(resume_from_checkpoint=resume)
    finish(run, folder)


def resumed(folder):
    vllm_engine(folder, resume=str(folder / "checkpoint-2"))


def alone(folder):
    """Rank 1 alone opens two engines, closes them and opens another; then both meet."""
    default = dist.group.WORLD
    num_rows = []
    if RANK == 1:
        learner, tokenizer = agent()
        ids = torch.tensor([[1, 2, 3]])
        for num_engines in (2, 1):
            engines = [VLLMRolloutEngine(learner, tokenizer) for _ in range(num_engines)]
            for engine in engines:
                num_rows.append(engine.rollout(ids, torch.ones_like(ids), 2, 4).output_ids.shape[0])
            for engine in engines:
                engine.close()
    ranks = [None] * 2
    dist.all_gather_object(ranks, num_rows)
    facts = {"num_rows": ranks, "is_default_kept": dist.group.WORLD is default}
    Path(folder, f"facts-{RANK}.json").write_text(json.dumps(facts))


def sharded(folder):
    """FSDP2 by accelerate, which offers it on GPUs: these ranks pass for some."""
    AcceleratorState._reset_state()
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    run = trainer(
        folder,
        "vllm",
        max_steps=2,
        accelerator_config={"use_configured_state": True},
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
    )
    run.train()
    shards = [p.to_local().numel() for p in run.model.parameters() if isinstance(p, DTensor)]
    whole = [p.numel() for p in run.model.parameters()]
    finish(run, folder, num_shards=len(shards), share=sum(shards) / sum(whole))


class LostEngine(TorchRolloutEngine):
    async def _sample(self, request):
        raise EngineError("lost")


def lost_engine(folder):
    """Rank 1's engine answers nobody: noticed before the next rollout."""
    learner = agent()
    engine = (LostEngine if RANK == 1 else TorchRolloutEngine)(*learner)
    run = trainer(folder, engine, learner=learner, max_steps=4)
    run.train()
    finish(run, folder)


STORIES = {
    f.__name__: f
    for f in (scripted, torch_engine, vllm_engine, alone, resumed, sharded, lost_engine)
}


def main():
    folder, *names = sys.argv[1:]
    for name in names:
        place = Path(folder, name)
        place.mkdir(exist_ok=True)
        start = time.time()
        STORIES[name](place)
        print(f"{name} on rank {RANK}: {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
