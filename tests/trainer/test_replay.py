"""Recorded rollouts played back: engine, tools, the trainer's tensors and loss, the command."""

from dataclasses import replace

import pytest
import torch
from fakes import ADD, add, call, tail, user
from trainers import REWARDS, TOOLS, config, fresh, rows

from agent_vllm import StopReason, collate, rollout_batch
from agent_vllm.cli import main
from agent_vllm.errors import EngineError, RecordError
from agent_vllm.record import (
    ReplayRolloutEngine,
    RolloutRecorder,
    read_rollouts,
    recorded_tools,
    to_trajectory,
)
from trl_integration import AgentGRPOTrainer
from trl_integration.rescore import RescoringTrainer, rescoring_config


def story(trajectory):
    """All of a trajectory but its times."""
    turns = [
        (
            turn.segment,
            turn.text,
            turn.suffix,
            [(call.call, call.result) for call in turn.calls],
            [(span.kind, span.name) for span in turn.spans],
        )
        for turn in trajectory.turns
    ]
    return replace(trajectory, turns=[]), turns


def settings(folder, **changes):
    return config(
        folder,
        **{
            "max_turns": 4,
            "save_strategy": "steps",
            "learning_rate": 1e-6,
            "logging_steps": 10,
            "record_rollouts": True,
            **changes,
        },
    )


class Step:
    """One rollout and its loss by a real trainer; the weights are those that it sampled with."""

    def __init__(self, agent, args, engine="torch", tools=TOOLS):
        model, tokenizer = agent
        self.trainer = AgentGRPOTrainer(
            model, REWARDS, args, rows(8), processing_class=tokenizer, tools=tools,
            rollout_engine=engine,
        )  # fmt: skip
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.model.train()
        batch = [row for row in rows(2) for _ in range(4)]
        self.inputs = self.trainer._generate_and_score_completions(batch)
        self.loss = self.trainer._compute_loss(self.trainer.model, self.inputs)
        self.trainer.close()


def different(inputs, others):
    """Names of tensors that are not the same to the last bit."""
    return [
        name
        for name in inputs.keys() | others.keys()
        if name != "row_number"
        and not (name in inputs and name in others and torch.equal(inputs[name], others[name]))
    ]


@pytest.fixture(scope="module")
def recorded(agent_path, tmp_path_factory):
    """A step of the real trainer, and its record."""
    folder = tmp_path_factory.mktemp("run")
    return Step(fresh(agent_path), settings(folder)), folder / "rollouts.jsonl"


# ---- the trainer ----


@pytest.mark.parametrize("old_logprobs", ["sampler", "recomputed"])
def test_a_replay_has_the_rewards_tensors_and_loss_of_the_run_to_the_last_bit(
    agent_path, tmp_path, old_logprobs
):
    step = Step(fresh(agent_path), settings(tmp_path, old_logprobs=old_logprobs))
    records = list(read_rollouts(tmp_path / "rollouts.jsonl"))
    rescoring = RescoringTrainer(
        REWARDS, rescoring_config(old_logprobs=old_logprobs), *fresh(agent_path)
    )
    replayed = rescoring.rescore(records)
    assert different(step.inputs, replayed.inputs) == []
    assert replayed.loss == step.loss.item()
    assert replayed.rewards == [record["rewards"] for record in records]
    pad_id = rescoring.processing_class.pad_token_id
    ours = collate([to_trajectory(record) for record in records], pad_id)
    theirs = collate(step.trainer.trajectories, pad_id)
    for name in ("input_ids", "attention_mask", "completion_mask", "old_per_token_logps"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_other_weights_change_the_loss_and_nothing_else(recorded, agent_path):
    step, path = recorded
    model, tokenizer = fresh(agent_path)
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(0.05)
        model.get_output_embeddings().weight[:10].add_(0.5)
    replayed = RescoringTrainer(REWARDS, None, model, tokenizer).rescore(list(read_rollouts(path)))
    assert different(step.inputs, replayed.inputs) == []
    assert replayed.loss != step.loss.item()


def test_the_recorded_logprobs_stand_in_for_the_model(recorded):
    step, path = recorded
    records = list(read_rollouts(path))
    replayed = RescoringTrainer(REWARDS).rescore(records)
    assert replayed.loss == pytest.approx(step.loss.item(), abs=1e-7)
    learner = step.trainer._learner_logps
    for row, record in zip(learner.tolist(), records, strict=True):
        known = [lp * bit for lp, bit in zip(row, record["completion_mask"], strict=False)]
        assert record["learner_logprobs"] == known


def test_the_trainer_makes_the_same_rollouts_from_a_replay_engine(recorded, agent_path, tmp_path):
    step, path = recorded
    agent = fresh(agent_path)
    engine = ReplayRolloutEngine(path, agent[1], eos_token_ids=step.trainer.eos_token_ids)
    again = Step(agent, settings(tmp_path), engine, recorded_tools(TOOLS))
    assert list(map(story, again.trainer.trajectories)) == list(
        map(story, step.trainer.trajectories)
    )
    assert different(step.inputs, again.inputs) == []
    assert torch.equal(step.loss, again.loss)


def test_groups_that_are_not_whole_are_refused(recorded):
    records = list(read_rollouts(recorded[1]))[:-1]
    with pytest.raises(RecordError, match=r"train step 0 has groups of \[3, 4\] samples"):
        RescoringTrainer(REWARDS).rescore(records)


# ---- the engine and the tools ----


def record_of(path, trajectories, **fields):
    with RolloutRecorder(path) as recorder:
        for trajectory in trajectories:
            recorder.write(trajectory, max_model_len=4096, **fields)
    return path


NUM_RUNS = 0


def count(word: str) -> str:
    """
    Another answer each time.

    Args:
        word: anything
    """
    global NUM_RUNS
    NUM_RUNS += 1
    if word == "bad":
        raise ValueError(f"run {NUM_RUNS}")
    return f"{word} {NUM_RUNS}"


TURNS = [
    call("count", word="x") + call("count", word="bad") + call("nope") + call("count", word="x"),
    call("count", word="汉"),
    "done",
]


def by_turn(chat):
    """The same three turns for every sample."""

    def script(request):
        num_turns = chat.tokenizer.decode(request.prompt_ids).count("<|im_start|>assistant")
        ids = chat.tokenizer(TURNS[num_turns - 1], add_special_tokens=False)["input_ids"]
        return [*ids, chat.tokenizer.eos_token_id]

    return script


def test_tools_answer_what_was_recorded_without_running(chat, scripted, tmp_path):
    options = {"num_generations": 3, "seed": 5}
    batch = ([user("a"), user("b")], [[count]] * 2)
    made = rollout_batch(scripted(by_turn(chat)), chat, *batch, **options)
    path = record_of(tmp_path / "r.jsonl", made)
    before = NUM_RUNS
    for _ in range(2):
        engine = ReplayRolloutEngine(path, chat.tokenizer)
        again = rollout_batch(engine, chat, batch[0], [recorded_tools([count])] * 2, **options)
        assert list(map(story, again)) == list(map(story, made))
    assert before == NUM_RUNS
    statuses = [result.status for result in made[0].tool_results]
    assert statuses == ["ok", "failed", "invalid", "ok", "ok"]
    # the results differ from sample to sample, so each got its own
    assert len({tail(chat, t) for t in made}) == 6


def test_samples_that_begin_alike_go_on_as_recorded(chat, scripted, tmp_path):
    endings = iter(["one", "two", "three"])

    def script(request):
        is_first = chat.tokenizer.decode(request.prompt_ids).count("assistant") == 1
        return engine.encode_turn(ADD if is_first else next(endings))

    engine = scripted(script)
    made = rollout_batch(engine, chat, [user()], [[add]], num_generations=3)
    assert len({t.turn_outputs[0] for t in made}) == 1
    replay = ReplayRolloutEngine(record_of(tmp_path / "r.jsonl", made), chat.tokenizer)
    again = rollout_batch(replay, chat, [user()], [[add]], num_generations=3)
    # which of them asks first is up to their tools
    assert sorted(t.turn_outputs[1] for t in again) == ["one", "three", "two"]


def test_an_engine_error_is_played_back_too(chat, scripted, tmp_path):
    turns = iter([ADD])

    def script(_):
        turn = next(turns, EngineError("lost"))
        return turn if isinstance(turn, Exception) else engine.encode_turn(turn)

    engine = scripted(script)
    made = rollout_batch(engine, chat, [user()], [[add]])
    assert made[0].stop_reason is StopReason.ENGINE_ERROR
    replay = ReplayRolloutEngine(record_of(tmp_path / "r.jsonl", made), chat.tokenizer)
    assert list(map(story, rollout_batch(replay, chat, [user()], [[add]]))) == [story(made[0])]


@pytest.mark.parametrize(
    ("messages", "tools", "message"),
    [
        (user("other"), [add], "No record has this prompt: none was recorded after these"),
        (user(), [], "No record has this prompt"),
    ],
)
def test_what_was_not_recorded_is_refused(chat, scripted, tmp_path, messages, tools, message):
    made = rollout_batch(scripted([ADD, "3"]), chat, [user()], [[add]])
    replay = ReplayRolloutEngine(record_of(tmp_path / "r.jsonl", made), chat.tokenizer)
    with pytest.raises(RecordError, match=message):
        rollout_batch(replay, chat, [messages], [tools])


def test_more_samples_than_were_recorded(chat, scripted, tmp_path):
    made = rollout_batch(scripted(["3"]), chat, [user()])
    replay = ReplayRolloutEngine(record_of(tmp_path / "r.jsonl", made), chat.tokenizer)
    with pytest.raises(RecordError, match="asked for more often than it was recorded"):
        rollout_batch(replay, chat, [user()], num_generations=2)


def test_another_tool_result_leads_away_from_the_record(chat, scripted, tmp_path):
    def other(a: int, b: int) -> int:
        return -1

    made = rollout_batch(scripted([ADD, "3"]), chat, [user()], [[add]])
    replay = ReplayRolloutEngine(record_of(tmp_path / "r.jsonl", made), chat.tokenizer)
    [tool] = recorded_tools([add])
    object.__setattr__(tool, "function", other)
    with pytest.raises(RecordError, match="Record rollout-0-0-0 differs: none was recorded after"):
        rollout_batch(replay, chat, [user()], [[tool]])


def test_single_requests_are_answered_by_their_ids(agent, tmp_path, chat, scripted):
    made = rollout_batch(scripted(["3"]), chat, [user()])
    replay = ReplayRolloutEngine(record_of(tmp_path / "r.jsonl", made), chat.tokenizer)
    ids = torch.tensor([made[0].prompt_ids])
    result = replay.rollout(ids, torch.ones_like(ids), 1, max_new_tokens=8)
    assert result.completion_ids.tolist() == [made[0].completion_ids]
    assert result.per_token_logps.tolist() == [made[0].logprobs]


# ---- the command ----


@pytest.fixture
def rewards_file(tmp_path):
    def write(text):
        path = tmp_path / "my_rewards.py"
        path.write_text(text)
        return path

    return write


SAME = "from tiny_tasks import correct_reward as _correct, format_reward as _format\n" + "".join(
    f"def {name}_reward(completions, **columns):\n    return _{name}(completions, **columns)\n"
    for name in ("correct", "format")
)


def test_the_command_reports_rewards_shapes_counts_and_loss(recorded, rewards_file, capsys):
    step, path = recorded
    assert main(["replay", str(path), "--rewards", str(rewards_file(SAME))]) == 0
    out = capsys.readouterr().out
    assert "train step 0: 8 trajectories, 2 prompts" in out
    batch = collate(step.trainer.trajectories, 0)
    assert f"input_ids {list(batch.input_ids.shape)}" in out
    assert f", {int(batch.completion_mask.sum())} sampled, " in out
    assert "learner logprobs recorded for 8/8" in out
    assert "correct_reward, format_reward: 0 rewards differ from the recorded ones" in out
    loss = float(out.split("loss: ")[1].split(",")[0])
    assert loss == pytest.approx(step.loss.item(), abs=1e-7)


def test_the_command_lists_what_differs(recorded, rewards_file, capsys):
    text = "def format_reward(completions, answer, stop_reason, **_):\n    return [7.0] * 8\n"
    assert main(["replay", str(recorded[1]), "--rewards", str(rewards_file(text))]) == 1
    out = capsys.readouterr().out
    assert "train-0-0-0 format_reward: recorded " in out and ", now 7.0" in out
    assert "format_reward: 8 rewards differ" in out


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("x = 1\n", [], "has no function that takes `completions`"),
        (SAME, ["--functions", "nope"], r"has no functions \['nope'\]; it has"),
    ],
)
def test_a_file_without_the_functions(recorded, rewards_file, text, options, message):
    with pytest.raises(SystemExit, match=message):
        main(["replay", str(recorded[1]), "--rewards", str(rewards_file(text)), *options])
