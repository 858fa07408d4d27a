"""The real TRL trainer with both engines: sync, loss, rewards, resume, endings, bad input."""

import asyncio
import functools
import math
import os
import shutil

import pytest
import torch
from datasets import Dataset
from fakes import call
from tiny_tasks import correct_reward, get_price, get_weather, make_tasks
from trainers import GAP, REWARDS, TOOLS, rows
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from agent_vllm import StopReason, TorchRolloutEngine, collate
from agent_vllm.errors import ChatTemplateError, EngineError, ToolDefinitionError
from agent_vllm.record import RolloutRecord, read_rollouts
from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.training import predicted_logprobs
from trl_integration import AgentGRPOTrainer

ENGINES = ["torch", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture
def make_trainer(new_trainer):
    """Builds trainers on the small agent; see `new_trainer`."""

    def make(engine="torch", **changes):
        defaults = {"max_steps": 2, "max_turns": 4, "reward_funcs": REWARDS, "tools": TOOLS}
        return new_trainer(engine, **{**defaults, **changes})

    return make


def parameters(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


# ---- training ----


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("old_logprobs", ["sampler", "recomputed"])
def test_it_trains_and_logs(make_trainer, engine, old_logprobs):
    trainer = make_trainer(engine, max_steps=3, old_logprobs=old_logprobs, beta=0.01)
    before = parameters(trainer.model)
    trainer.train()
    assert not torch.equal(before, parameters(trainer.model))
    log = trainer.state.log_history[0]
    assert log["sampling/logprob_gap/max"] <= GAP
    assert log["completions/mean_length"] > 0
    shares = [value for name, value in log.items() if name.startswith("rollout/stop_reason/")]
    assert sum(shares) == pytest.approx(1.0)
    expected = {"rewards/correct_reward/mean", "kl", "tools/call_frequency", "rollout/turns"}
    assert expected <= log.keys()
    assert ("sampling/importance_sampling_ratio/mean" in log) == (old_logprobs == "recomputed")


@pytest.mark.vllm
def test_both_engines_train_to_the_same_weights(agent_path, make_trainer):
    learned = []
    for engine in ("torch", "vllm"):
        model = AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32")
        trainer = make_trainer(engine, model=model, max_steps=2)
        trainer.train()
        learned.append(parameters(model))
    assert (learned[0] - learned[1]).abs().max() < 1e-4


class VersionRecorder(TrainerCallback):
    """Notes the engine's version before and after every optimizer step."""

    def __init__(self):
        self.events = []
        self.engine = None

    def on_pre_optimizer_step(self, *_, **__):
        self.events.append(("step", self.engine.policy_version))


class RecordingTrainer(AgentGRPOTrainer):
    def _generate(self, prompts):
        output = super()._generate(prompts)
        versions = {v for t in self.trajectories for v in t.policy_versions}
        self.events.append(("rollout", *versions))
        return output


@pytest.mark.parametrize("engine", ENGINES)
def test_one_sync_for_each_optimizer_step_and_one_before_the_first_rollout(make_trainer, engine):
    recorder = VersionRecorder()
    trainer = make_trainer(
        engine,
        trainer_class=RecordingTrainer,
        callbacks=[recorder],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=6,
    )
    recorder.engine, trainer.events = trainer.rollout_engine, recorder.events
    start = trainer.rollout_engine.policy_version
    trainer.train()
    events = [(name, version - start) for name, version in recorder.events]
    # 4 micro-batches x 2 iterations = 8 micro-steps = 4 optimizer steps a rollout
    assert events == [
        ("rollout", 1), ("step", 1), ("step", 2), ("step", 3), ("step", 4),
        ("rollout", 5), ("step", 5), ("step", 6),
    ]  # fmt: skip
    assert trainer.rollout_engine.policy_version - start == 1 + 6


@pytest.mark.parametrize(("sync_weights", "num_syncs"), [("after_step", 4), ("before_rollout", 2)])
def test_syncs_that_no_rollout_sees_can_be_left_out(make_trainer, sync_weights, num_syncs):
    """The versions stay those of optimizer steps, and every rollout has the current weights."""
    trainer = make_trainer(
        "torch", num_iterations=2, max_steps=3, learning_rate=1e-3, sync_weights=sync_weights
    )
    engine, synced, rollouts = trainer.rollout_engine, [], []
    update, generate = engine.update_policy, trainer._generate
    engine.update_policy = lambda model: synced.append(update(model)) or synced[-1]

    def generate_noted(prompts):
        output = generate(prompts)
        rollouts.append(engine.policy_version)
        return output

    trainer._generate = generate_noted
    start = engine.policy_version
    trainer.train()
    assert len(synced) == num_syncs
    assert [version - start for version in rollouts] == [1, 3]  # the third step has a new one
    assert engine.policy_version - start == 1 + 3
    name = "sampling/logprob_gap/max"
    gaps = [log[name] for log in trainer.state.log_history if name in log]
    assert len(gaps) == 2 and max(gaps) <= GAP


def test_evaluation_uses_the_current_weights_without_training_first(make_trainer):
    trainer = make_trainer("torch", eval_dataset=rows(4, "test"), per_device_eval_batch_size=8)
    metrics = trainer.evaluate()
    assert trainer.rollout_engine.policy_version == 1
    assert metrics["eval_sampling/logprob_gap/max"] <= GAP
    trainer.evaluate()
    assert trainer.rollout_engine.policy_version == 2  # weights may have changed by hand


@pytest.mark.vllm
def test_evaluation_groups_have_their_own_size(make_trainer):
    trainer = make_trainer(
        "vllm",
        eval_dataset=rows(4, "test"),
        num_generations_eval=2,
        per_device_eval_batch_size=8,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        max_steps=1,
    )
    trainer.train()
    evaluations = [log for log in trainer.state.log_history if "eval_reward" in log]
    assert len(evaluations) == 2
    assert evaluations[1]["eval_sampling/logprob_gap/max"] <= GAP


@pytest.mark.parametrize(
    "wrapped",
    [
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
    ],
)
def test_wrapped_learners_give_the_engine_their_weights(make_trainer, wrapped):
    trainer = make_trainer("torch", **wrapped)
    before = parameters(trainer.model)
    trainer.train()
    assert not torch.equal(before, parameters(trainer.model))
    gaps = [log["sampling/logprob_gap/max"] for log in trainer.state.log_history[:2]]
    assert max(gaps) <= GAP


# ---- the loss ----


def by_hand(trainer, batch, advantages):
    """The clipped loss from the shifted layout of `collate`, averaged over trained tokens."""
    logits = trainer.model(batch.input_ids, attention_mask=batch.attention_mask).logits
    logprobs = predicted_logprobs(logits, batch.input_ids, trainer.temperature)
    ratio = torch.exp(logprobs - batch.old_per_token_logps)
    clipped = ratio.clamp(1 - trainer.epsilon_low, 1 + trainer.epsilon_high)
    loss = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
    mask = batch.completion_mask
    if trainer.loss_type == "grpo":
        return ((loss * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
    return (loss * mask).sum() / mask.sum()


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_the_loss_is_the_one_by_hand_from_the_shifted_layout(make_trainer, loss_type):
    trainer = make_trainer("torch", loss_type=loss_type, max_logprob_gap=math.inf)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    prompts = [row for row in rows(2) for _ in range(4)]
    inputs = trainer._generate_and_score_completions(prompts)
    assert any(t.num_turns > 1 for t in trainer.trajectories)
    with torch.no_grad():  # move on, so that the ratio is not 1
        for parameter in trainer.model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.manual_seed(0)))
    advantages = torch.linspace(-1, 1, 8)
    loss = trainer._compute_loss(trainer.model, {**inputs, "advantages": advantages})
    batch = collate(trainer.trajectories, trainer.processing_class.pad_token_id)
    torch.testing.assert_close(loss, by_hand(trainer, batch, advantages), atol=1e-5, rtol=1e-4)


def test_no_gradient_where_an_observation_is_predicted(make_trainer):
    trainer = make_trainer("torch")
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([r for r in rows(2) for _ in range(4)])
    batch = collate(trainer.trajectories, trainer.processing_class.pad_token_id)
    logits = trainer.model(batch.input_ids, attention_mask=batch.attention_mask).logits.detach()
    logits.requires_grad_(True)
    logprobs = predicted_logprobs(logits, batch.input_ids)
    (torch.exp(logprobs - batch.old_per_token_logps) * batch.completion_mask).sum().backward()
    trained = logits.grad[:, :-1].abs().sum(-1) > 0
    assert trained.long().tolist() == batch.completion_mask.tolist()
    completion = inputs["completion_mask"] * inputs["tool_mask"]
    assert completion.sum() == batch.completion_mask.sum()


def test_the_batch_has_the_keys_of_the_parent_and_the_engines_logprobs(make_trainer, agent):
    model, tokenizer = agent
    trainer = make_trainer("torch")
    inputs = [row for row in rows(2) for _ in range(4)]
    ours = trainer._generate_and_score_completions(inputs)
    parent = GRPOTrainer(
        model=model,
        reward_funcs=correct_reward,
        args=GRPOConfig(
            trainer.args.output_dir, per_device_train_batch_size=8, num_generations=4, bf16=False,
            max_completion_length=40, report_to="none", use_cpu=True, gradient_checkpointing=False,
        ),
        train_dataset=rows(),
        processing_class=tokenizer,
        tools=TOOLS,
    )  # fmt: skip
    theirs = parent._generate_and_score_completions(inputs)
    assert theirs.keys() <= ours.keys()
    assert ours.keys() - theirs.keys() == {"old_per_token_logps", "sampling_per_token_logps"}
    assert torch.equal(ours["old_per_token_logps"], ours["sampling_per_token_logps"])
    for row, trajectory in enumerate(trainer.trajectories):
        length = len(trajectory.completion_ids)
        assert ours["completion_ids"][row, :length].tolist() == trajectory.completion_ids
        assert ours["tool_mask"][row, :length].tolist() == trajectory.completion_mask


# ---- endings ----


def test_an_all_truncated_batch_leaves_the_weights_as_they_are(make_trainer):
    trainer = make_trainer(
        "torch", max_new_tokens=2, mask_truncated_completions=True, weight_decay=0.0
    )
    before = parameters(trainer.model)
    trainer.train()
    assert {t.stop_reason for t in trainer.trajectories} == {StopReason.TURN_LENGTH}
    log = trainer.state.log_history[0]
    assert log["completions/clipped_ratio"] == 1.0
    assert log["completions/mean_length"] == 2.0
    assert log["loss"] == 0.0
    assert torch.equal(before, parameters(trainer.model))


def test_truncated_and_empty_rows_are_kept_with_masks_of_zero(make_trainer):
    trainer = make_trainer("torch", mask_truncated_completions=True, max_turns=0)
    inputs = trainer._generate_and_score_completions([row for row in rows(2) for _ in range(4)])
    assert inputs["completion_ids"].shape == (8, 1)
    assert not (inputs["completion_mask"] * inputs["tool_mask"]).any()
    loss = trainer._compute_loss(trainer.model.eval(), inputs)
    assert loss.item() == 0.0


def test_a_prompt_that_is_too_long_ends_alone(make_trainer, agent):
    model, tokenizer = agent
    engine = TorchRolloutEngine(model, tokenizer, max_model_len=400)
    data = [dict(row) for row in rows(2)]
    data[0]["prompt"] = [{"role": "user", "content": "x " * 600}]
    trainer = make_trainer(engine, train_dataset=Dataset.from_list(data))
    inputs = trainer._generate_and_score_completions([row for row in data for _ in range(4)])
    reasons = [t.stop_reason for t in trainer.trajectories]
    assert reasons[:4] == [StopReason.CONTEXT_FULL] * 4
    assert StopReason.CONTEXT_FULL not in reasons[4:]
    assert (inputs["completion_mask"] * inputs["tool_mask"])[:4].sum() == 0
    engine.close()


class FailingEngine(TorchRolloutEngine):
    """Fails for `num_failing` requests, also when they are made again."""

    num_failing = 0

    def __init__(self, *args):
        super().__init__(*args)
        self.failing = set()

    async def _sample(self, request):
        if len(self.failing) < self.num_failing:
            self.failing.add(request.seed)
        if request.seed in self.failing:
            raise EngineError("lost")
        return await super()._sample(request)


def test_engine_errors_leave_rows_out_and_a_dead_engine_stops_the_run(make_trainer, agent):
    engine = FailingEngine(*agent)
    trainer = make_trainer(engine, max_turns=1)
    batch = [row for row in rows(2) for _ in range(4)]
    engine.num_failing = 3
    inputs = trainer._generate_and_score_completions(batch)
    reasons = [t.stop_reason for t in trainer.trajectories]
    assert reasons.count(StopReason.ENGINE_ERROR) == 3
    left_out = [reason is StopReason.ENGINE_ERROR for reason in reasons]
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    assert [bool(row.any()) for row in mask] == [not out for out in left_out]
    engine.num_failing = 100
    with pytest.raises(EngineError, match="failed all 8 trajectories"):
        trainer._generate_and_score_completions(batch)
    engine.close()


# ---- rewards ----


def test_rewards_get_messages_columns_and_the_stop_reason(make_trainer):
    seen = {}

    def look(completions, answer, stop_reason, num_calls, prompts, **kwargs):
        seen.update(
            completions=completions, answer=answer, stop_reason=stop_reason, calls=num_calls
        )
        return [None if index == 0 else 1.0 for index in range(len(completions))]

    async def asynchronous(completions, **kwargs):
        return [0.5] * len(completions)

    class Scorer:
        def __call__(self, completions, bonus=1.0, **kwargs):
            return [bonus] * len(completions)

    trainer = make_trainer(
        "torch", reward_funcs=[look, asynchronous, Scorer(), functools.partial(Scorer(), bonus=2.0)]
    )
    batch = [row for row in rows(2) for _ in range(4)]
    trainer._generate_and_score_completions(batch)
    assert seen["answer"] == [row["answer"] for row in batch]
    assert set(seen["stop_reason"]) <= {reason.value for reason in StopReason}
    called = [m for c in seen["completions"] for m in c if m["role"] == "assistant"]
    assert any("tool_calls" in message for message in called)
    assert all(isinstance(m["content"], str) for c in seen["completions"] for m in c)
    assert seen["calls"] == [
        sum(message["role"] == "tool" for message in c) for c in seen["completions"]
    ]


def test_a_rows_tools_column_picks_its_tools(make_trainer):
    data = [
        {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "answer": "2", "tools": names}
        for names in (["calculator"], ["get_price"])
    ]
    trainer = make_trainer("torch", train_dataset=Dataset.from_list(data))
    trainer._generate_and_score_completions([row for row in data for _ in range(4)])
    prompts = [trainer.processing_class.decode(t.prompt_ids) for t in trainer.trajectories]
    assert all("calculator" in p and "get_price" not in p for p in prompts[:4])
    assert all("get_price" in p and "calculator" not in p for p in prompts[4:])


def test_tools_can_be_a_function_of_the_row(make_trainer):
    trainer = make_trainer("torch", tools=lambda row: [get_price] if row["kind"] else [])
    trainer._generate_and_score_completions([dict(row) for row in rows(4)])
    prompts = [trainer.processing_class.decode(t.prompt_ids) for t in trainer.trajectories]
    assert all("get_price" in p and "calculator" not in p for p in prompts)


class Shop:
    """An environment as TRL documents them: reset, public methods as tools, its own reward."""

    def reset(self, answer, **row):
        self.asked = []
        return f" TASK-7 {answer}"

    def get_price(self, item: str) -> str:
        """Looks up a price.

        Args:
            item: The item's name.
        """
        self.asked.append(item)
        return "7"

    def get_reward(self):
        return float(len(self.asked))


def test_an_environment_gives_the_task_the_tools_and_the_reward(make_trainer, agent):
    def script(request):
        is_answered = "tool\n7" in engine.tokenizer.decode(request.prompt_ids)
        return engine.encode_turn("It costs 7." if is_answered else call("get_price", item="lamp"))

    engine = ScriptedRolloutEngine(agent[1], script)
    trainer = make_trainer(engine, tools=None, reward_funcs=None, environment_factory=Shop)
    data = Dataset.from_list(make_tasks("train", 2, kinds=("price",)))
    trainer._generate_and_score_completions([row for row in data for _ in range(4)])
    prompts = [trainer.processing_class.decode(t.prompt_ids) for t in trainer.trajectories]
    assert all("TASK-7" in prompt and "get_price" in prompt for prompt in prompts)
    assert [environment.asked for environment in trainer.environments] == [["lamp"]] * 8
    assert trainer.rollout.rewards.tolist() == [[1.0]] * 8
    assert {t.stop_reason for t in trainer.trajectories} == {StopReason.ANSWERED}


def test_the_dataset_is_not_written_to(make_trainer):
    data = rows(4)
    before = data.to_list()
    trainer = make_trainer("torch", train_dataset=data, max_steps=3)
    trainer.train()
    assert data.to_list() == before


# ---- saving, resuming, stopping ----


@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(make_trainer, agent_path, engine, tmp_path):
    def run(output_dir, **changes):
        model = AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32")
        trainer = make_trainer(
            engine, model=model, output_dir=str(output_dir), save_strategy="steps", save_steps=2,
            max_steps=4, record_rollouts=True, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer.train(**changes)
        return trainer

    whole = run(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    resumed = run(tmp_path / "again", resume_from_checkpoint=str(tmp_path / "again/checkpoint-2"))

    def rollouts(name):
        records = read_rollouts(tmp_path / name / "rollouts.jsonl")
        return [(r["step"], r["completion_ids"]) for r in records if r["step"] >= 2]

    assert rollouts("again") == rollouts("whole")
    assert len(rollouts("again")) == 16
    gap = next(log for log in resumed.state.log_history if log["step"] == 3)
    assert gap["sampling/logprob_gap/max"] <= GAP  # not the base weights
    # who shares a batch depends on how fast tools are, and the last bit of a logprob on that
    torch.testing.assert_close(
        parameters(resumed.model), parameters(whole.model), atol=1e-4, rtol=0
    )


def test_two_seeds_sample_differently_and_one_seed_repeats(make_trainer, agent_path, tmp_path):
    def sampled(seed):
        model = AutoModelForCausalLM.from_pretrained(agent_path, dtype="float32")
        trainer = make_trainer("torch", model=model, seed=seed)
        trainer._generate_and_score_completions([row for row in rows(2) for _ in range(4)])
        return [t.completion_ids for t in trainer.trajectories]

    first = sampled(1)
    assert first == sampled(1)
    assert first != sampled(2)
    assert len({tuple(ids) for ids in first[:4]}) > 1  # the samples of one prompt differ


def test_ctrl_c_in_a_rollout_stops_cleanly_with_the_last_checkpoint_whole(make_trainer, tmp_path):
    num_calls = 0

    def calculator(expression: str) -> str:
        """Adds.

        Args:
            expression: What to add.
        """
        nonlocal num_calls
        num_calls += 1
        if trainer.state.global_step == 2:
            raise KeyboardInterrupt
        return "1"

    trainer = make_trainer(
        "torch", tools=[calculator, get_weather, get_price], save_strategy="steps", save_steps=1,
        max_steps=5, record_rollouts=True,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    saved = sorted(os.listdir(tmp_path / "out"))
    assert "checkpoint-2" in saved and num_calls > 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-2")
    records = list(read_rollouts(tmp_path / "out" / "rollouts.jsonl"))
    assert {record["step"] for record in records} == {0, 1}
    trainer.rollout_engine.update_policy(trainer.model)  # the engine is idle and whole


def test_what_async_tools_and_rewards_cache_lives_on_over_optimizer_steps(make_trainer):
    lock, loops, num_calls = asyncio.Lock(), set(), 0

    async def ask():
        async with lock:  # an error once it waits on another loop
            await asyncio.sleep(0.01)
            loops.add(asyncio.get_running_loop())

    async def calculator(expression: str) -> str:
        """Calculate.

        Args:
            expression: What to calculate.
        """
        nonlocal num_calls
        num_calls += 1
        await ask()
        return "1"

    async def reward(completions, **_):
        await ask()
        return [0.0] * len(completions)

    trainer = make_trainer(
        "torch", tools=[calculator, get_weather, get_price], reward_funcs=[*REWARDS, reward],
        max_steps=3,
    )  # fmt: skip
    trainer.train()
    assert len(loops) == 1 and num_calls > 3
    key = "tools/calculator/failure_frequency"
    assert {entry[key] for entry in trainer.state.log_history if key in entry} == {0.0}


def test_the_record_holds_what_was_trained(make_trainer, tmp_path):
    trainer = make_trainer("torch", record_rollouts=True, max_steps=1)
    trainer.train()
    records = list(read_rollouts(tmp_path / "out" / "rollouts.jsonl"))
    assert [r["completion_ids"] for r in records] == [
        t.completion_ids for t in trainer.trajectories
    ]
    record = records[0]
    assert record["rewards"].keys() == {"correct_reward", "format_reward"}
    assert (
        len(record["completion_ids"]) == len(record["completion_mask"]) == len(record["logprobs"])
    )
    assert RolloutRecord.model_validate_json(record.model_dump_json(by_alias=True)) == record


# ---- bad input ----


def tool_without_hints(x):
    """Does something.

    Args:
        x: Something.
    """


def tool_without_docstring(x: int) -> int:
    return x


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"engine": "sglang"}, ValueError, "`rollout_engine` must be one of"),
        (
            {"train_dataset": Dataset.from_dict({"prompt": []})},
            ValueError,
            "`train_dataset` is empty",
        ),
        (
            {"train_dataset": Dataset.from_dict({"question": ["a"]})},
            ValueError,
            r"must have a column 'prompt', got \['question'\]",
        ),
        (
            {"train_dataset": Dataset.from_dict({"prompt": ["a"] * 8})},
            ValueError,
            "conversational prompt .* where there are tools",
        ),
        (
            {"train_dataset": Dataset.from_dict({"prompt": [[]] * 8, "images": [[]] * 8})},
            ValueError,
            "has a column 'images', and rollouts are text only",
        ),
        ({"tools": [tool_without_hints]}, ToolDefinitionError, "`tool_without_hints`"),
        ({"tools": [tool_without_docstring]}, ToolDefinitionError, "`tool_without_docstring`"),
        ({"tools": [get_price, get_price]}, ToolDefinitionError, "Two tools are named `get_price`"),
        ({"rollout_func": print}, ValueError, "`rollout_func` is refused"),
        ({"use_vllm": True}, ValueError, "`use_vllm` must be left at False"),
        ({"repetition_penalty": 1.2}, ValueError, "`repetition_penalty`"),
        ({"num_generations": 3}, ValueError, "must be divisible by num_generations"),
        ({"old_logprobs": "guess"}, ValueError, "`old_logprobs` must be one of"),
        ({"thinking_ratio": 2.0}, ValueError, "`thinking_ratio` must be in"),
        ({"max_turns": -1}, ValueError, "`max_turns` must be 0 or more"),
        ({"args": GRPOConfig("out", bf16=False, use_cpu=True)}, TypeError, "`AgentGRPOConfig`"),
    ],
)
def test_bad_input_is_refused_by_name(make_trainer, changes, error, message):
    with pytest.raises(error, match=message):
        make_trainer(**changes)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not support tools"),
    ],
)
def test_a_tokenizer_without_tool_support_is_refused(make_trainer, agent, template, message):
    agent[1].chat_template = template
    with pytest.raises(ChatTemplateError, match=message):
        make_trainer("torch")


def test_a_row_that_names_an_unknown_tool_says_which(make_trainer):
    data = [{"prompt": [{"role": "user", "content": "?"}], "answer": "", "tools": ["nope"]}]
    trainer = make_trainer("torch", train_dataset=Dataset.from_list(data))
    with pytest.raises(ToolDefinitionError, match="names 'nope'"):
        trainer._generate_and_score_completions(data * 4)
