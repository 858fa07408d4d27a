"""Rollouts where nothing can be called: text prompts, and completions as TRL decodes them."""

import re

import fakes
import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

from agent_vllm.errors import ChatTemplateError
from agent_vllm.record import read_rollouts
from agent_vllm.testing import ScriptedRolloutEngine
from trl_integration.rescore import RescoringTrainer, rescoring_config

MESSAGES = [{"role": "user", "content": "hi"}]
THOUGHT = "<think>\nWhy? \n</think>\n Yes. "  # white space and all


def tool_free_model(tokenizer):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        )
    )  # fmt: skip


class Seen:
    """A reward function that keeps what it was given."""

    __name__ = "seen"

    def __init__(self):
        self.prompts, self.completions = [], []

    def __call__(self, prompts, completions, **_):
        self.prompts += prompts
        self.completions += completions
        return [float(index) for index in range(len(prompts))]


@pytest.fixture
def make(new_trainer, monkeypatch):
    """Builds trainers of a tiny model without tools; `<think>` is no special token."""
    monkeypatch.setattr(fakes, "SPECIAL", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])

    def build(engine="torch", *, prompts=("one", "two"), template=True, **changes):
        tokenizer = fakes.chatml_tokenizer()
        if not template:
            tokenizer.chat_template = None
        if engine == "thinking":
            engine = ScriptedRolloutEngine(tokenizer, [THOUGHT])
            changes = {"max_completion_length": 100, **changes}
        defaults = {
            "model": tool_free_model(tokenizer), "processing_class": tokenizer,
            "reward_funcs": Seen(), "train_dataset": Dataset.from_dict({"prompt": list(prompts)}),
            "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 6,
            "max_steps": 1,
        }  # fmt: skip
        return new_trainer(engine, **{**defaults, **changes})

    return build


def stock(trainer, tmp_path, rows):
    """What stock TRL makes of a batch of rows with the trainer's completions."""
    args = GRPOConfig(
        str(tmp_path / "stock"), per_device_train_batch_size=4, num_generations=2, use_cpu=True,
        bf16=False, report_to="none", max_completion_length=6,
    )  # fmt: skip
    seen = Seen()
    parent = GRPOTrainer(
        trainer.model, seen, args=args, train_dataset=Dataset.from_list(rows),
        processing_class=trainer.processing_class,
    )  # fmt: skip
    ids = [trajectory.completion_ids for trajectory in trainer.trajectories]
    parent._generate_single_turn = lambda *_, **__: (ids, None)
    output = parent._generate_and_score_completions(rows)
    return seen, output


# ---- completions are decoded text ----


def test_without_tools_a_completion_is_the_decoded_text(make, tmp_path):
    trainer = make("thinking", prompts=[MESSAGES] * 2, reward_funcs=[think_format_reward])
    rows = [{"prompt": MESSAGES}] * 4
    trainer._generate_and_score_completions(rows)
    assert trainer.trajectories[0].completion_messages == [
        {"role": "assistant", "content": THOUGHT}
    ]
    assert trainer.rollout.rewards.tolist() == [[1.0]] * 4
    seen, _ = stock(trainer, tmp_path, rows)
    assert seen.completions == [t.completion_messages for t in trainer.trajectories]


def test_a_cut_completion_is_the_decoded_text_too(make):
    trainer = make("thinking", prompts=[MESSAGES] * 2, max_new_tokens=3)
    trainer._generate_and_score_completions([{"prompt": MESSAGES}] * 4)
    (message,) = trainer.trajectories[0].completion_messages
    assert message["content"] == trainer.processing_class.decode(
        trainer.trajectories[0].completion_ids
    )


def test_with_a_user_the_turns_are_read(make):
    trainer = make("thinking", prompts=[MESSAGES] * 2, user=lambda row: None)
    trainer._generate_and_score_completions([{"prompt": MESSAGES}] * 4)
    (message,) = trainer.trajectories[0].completion_messages
    assert message["content"] == "Yes."


# ---- text prompts ----


@pytest.mark.parametrize("template", [True, False])
def test_text_prompts_are_what_they_are_in_trl(make, tmp_path, template):
    seen = Seen()
    trainer = make(template=template, reward_funcs=seen)
    rows = [{"prompt": text} for text in ("one", "one", "two", "two")]
    output = trainer._generate_and_score_completions(rows)
    expected_seen, expected = stock(trainer, tmp_path, rows)
    assert seen.prompts == expected_seen.prompts == ["one", "one", "two", "two"]
    assert seen.completions == expected_seen.completions
    assert all(isinstance(completion, str) for completion in seen.completions)
    for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"):
        assert output[name].tolist() == expected[name].tolist()


def test_text_prompts_train_and_evaluate(make):
    eval_dataset = Dataset.from_dict({"prompt": ["three"] * 2})
    trainer = make(template=False, eval_dataset=eval_dataset, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert any("eval_reward" in entry for entry in trainer.state.log_history)
    assert trainer.evaluate(Dataset.from_dict({"prompt": ["four"] * 2}))["eval_reward"] == 1.5
    assert trainer.trajectories[0].messages[0] == {"role": "prompt", "content": "four"}


def test_text_prompts_may_come_from_a_stream(make):
    rows = IterableDataset.from_generator(lambda: ({"prompt": text} for text in "abcd"))
    trainer = make(template=False, train_dataset=rows)
    trainer.train()
    prompt = trainer.processing_class.decode(trainer.trajectories[0].prompt_ids)
    assert prompt in "abcd"


def test_a_recorded_run_on_text_is_scored_from_its_record(make, tmp_path):
    trainer = make(record_rollouts=True)
    trainer.train()
    trainer.close()
    records = list(read_rollouts(tmp_path / "out" / "rollouts.jsonl"))
    seen = Seen()
    with_records = RescoringTrainer([seen], rescoring_config(num_generations=2))
    with_records.rescore(records)
    assert sorted(set(seen.prompts)) == ["one", "two"]
    assert all(isinstance(completion, str) for completion in seen.completions)


@pytest.mark.parametrize("source", ["dataset", "stream", "evaluate"])
def test_text_prompts_are_refused_where_there_are_tools(make, source):
    def get_time() -> str:
        """Return the time."""
        return "noon"

    texts = Dataset.from_dict({"prompt": ["one", "two"]})
    data = {"dataset": texts, "stream": texts.to_iterable_dataset()}
    start = Dataset.from_dict({"prompt": [MESSAGES] * 2})
    with pytest.raises(ValueError, match=r"conversational prompt .* where there are tools"):
        trainer = make(train_dataset=data.get(source, start), tools=[get_time])
        trainer.train() if source == "stream" else trainer.evaluate(texts)


def test_a_conversation_needs_a_chat_template(make):
    trainer = make(template=False)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        trainer._generate_and_score_completions([{"prompt": MESSAGES}] * 4)


# ---- rows without a prompt ----


@pytest.mark.parametrize("missing", [None, []])
def test_a_row_without_a_prompt_is_named(make, missing):
    prompts = [MESSAGES] * 5 + [missing] + [MESSAGES] * 2
    message = rf"Row 5 of `train_dataset` must have a prompt .* got {re.escape(repr(missing))}"
    with pytest.raises(ValueError, match=message):
        make(prompts=prompts)
    rows = Dataset.from_dict({"prompt": prompts})
    with pytest.raises(ValueError, match=r"Row 5 of `eval_dataset\['other'\]`"):
        make(eval_dataset={"other": rows})
    with pytest.raises(ValueError, match="Row 0 of `train_dataset`"):
        make(train_dataset=rows.select([5, 0]))
    with pytest.raises(ValueError, match=r"Row \d of the batch"):
        make(train_dataset=rows.select([0, 5]).to_iterable_dataset(), num_generations=4,
             per_device_train_batch_size=8).train()  # fmt: skip
