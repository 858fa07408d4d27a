"""Exported rollouts in TRL's SFTTrainer: it trains the sampled tokens, all and no others."""

import pytest
from datasets import load_dataset
from records import TOOLS
from tiny_tasks import make_tasks
from trl import SFTConfig, SFTTrainer

from agent_vllm import ChatFormat, Limits, TorchRolloutEngine, rollout_batch
from agent_vllm.record import RolloutRecorder
from agent_vllm.record.export import write_parquet


def test_the_loss_is_of_the_sampled_tokens_as_the_engine_scored_them(agent, tmp_path):
    model, tokenizer = agent
    rows = make_tasks("train", 8)
    trajectories = rollout_batch(
        TorchRolloutEngine(model, tokenizer),
        ChatFormat.from_tokenizer(tokenizer),
        [row["prompt"] for row in rows],
        [TOOLS] * len(rows),
        limits=Limits(max_turns=3, max_completion_tokens=120),
        seed=0,
    )
    with RolloutRecorder(tmp_path / "rollouts.jsonl", tokenizer=tokenizer) as recorder:
        for trajectory in trajectories:
            recorder.write(trajectory)
    dataset = tmp_path / "sft.parquet"
    assert write_parquet(tmp_path / "rollouts.jsonl", dataset, to="sft") == len(rows)
    table = load_dataset("parquet", data_files=str(dataset), split="train")
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            str(tmp_path / "out"),
            max_length=None,
            per_device_eval_batch_size=len(rows),
            bf16=False,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=table,
        eval_dataset=table,
        processing_class=tokenizer,
    )

    logprobs = [
        logprob
        for trajectory in trajectories
        for turn in trajectory.turns
        for logprob in turn.segment.logprobs
    ]
    assert max(t.num_turns for t in trajectories) > 1  # some rows have observed tokens
    expected = -sum(logprobs) / len(logprobs)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
