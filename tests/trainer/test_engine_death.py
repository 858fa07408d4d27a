"""An engine that fails, runs out of memory, hangs or dies in training: real engines whose step is
made to, in the real trainer. A run that goes on is the run that it would have been."""

import functools
import re
import threading

import pytest
import torch
import trainers
from tiny_tasks import correct_reward
from trainers import TOOLS, fresh, rows
from transformers import TrainerCallback

from agent_vllm import StopReason, TorchRolloutEngine, collate, rollout_batch
from agent_vllm.errors import EngineDeadError
from agent_vllm.record import read_rollouts
from agent_vllm.training import predicted_logprobs

ENGINES = ["torch", pytest.param("vllm", marks=pytest.mark.vllm)]
FAILED_ALL = "it failed all 8 trajectories, the first with: "
RAISED = "The engine failed: RuntimeError: on purpose"
HUNG = "The engine hangs: it has made no progress for 10 s."


def steps_of(engine):
    """Return the object that has the engine's step."""
    return engine._batch if isinstance(engine, TorchRolloutEngine) else engine._stepper._llm


class Breaker(TrainerCallback):
    """Puts another step into the trainer's engine before an optimizer step."""

    trainer = None

    def __init__(self, at_step, make_step):
        self.at_step, self.make_step = at_step, make_step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.at_step:
            self.break_engine()

    def break_engine(self):
        engine = self.trainer.rollout_engine
        steps_of(engine).step = self.make_step(steps_of(engine).step, engine)


@pytest.fixture
def hanging():
    """A step that comes back only at the test's end; the threads in it then end too."""
    end, threads = threading.Event(), []

    def step(engine):
        threads.append(threading.current_thread())
        engine._driver._progress_at = 0.0  # as if it had been in here for long
        end.wait()
        return []

    yield lambda _, engine: functools.partial(step, engine)
    end.set()
    for thread in threads:
        thread.join(30)


def raising(*_):
    def step():
        raise RuntimeError("on purpose")

    return step


def out_of_memory_once(step, _):
    failures = iter([torch.OutOfMemoryError("on purpose")])

    def failing_step():
        for failure in failures:
            raise failure
        return step()

    return failing_step


def build(agent_path, folder, engine="torch", breaker=None, model=None, **settings):
    """A trainer on the small agent; an engine that it builds is watched closely."""
    if isinstance(engine, str):
        settings["rollout_engine_kwargs"] = {"hang_s": 10}
    own_model, tokenizer = fresh(agent_path)
    trainer = trainers.build(
        (model or own_model, tokenizer),
        folder,
        engine,
        reward_funcs=correct_reward,
        tools=TOOLS,
        callbacks=[breaker] if breaker else None,
        max_steps=3,
        max_completion_length=100,
        max_turns=3,
        lr_scheduler_type="constant",
        record_rollouts=True,
        **settings,
    )
    if breaker:
        breaker.trainer = trainer
    return trainer


@pytest.fixture
def make_trainer(agent_path, tmp_path):
    built = []

    def make(engine="torch", **options):
        built.append(build(agent_path, tmp_path / "out", engine, **options))
        return built[-1]

    yield make
    for trainer in built:
        trainer.close()


@pytest.fixture(scope="module")
def plain(agent_path, tmp_path_factory):
    """The run in which nothing happens, once for each engine."""

    @functools.cache
    def run(engine):
        trainer = build(agent_path, tmp_path_factory.mktemp(engine), engine)
        trainer.train()
        trainer.close()
        return trainer

    return run


def parameters(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def records(trainer, **where):
    found = read_rollouts(f"{trainer.args.output_dir}/rollouts.jsonl")
    return [r for r in found if all(r[key] == value for key, value in where.items())]


def story(trainer):
    """Return each trained trajectory, step by step."""
    return [
        (r["step"], r["seed"], r["completion_ids"], r["advantage"])
        for r in records(trainer, trained=True)
    ]


def versions(trainer):
    return [r["policy_versions"] for r in records(trainer, trained=True)]


def logged(trainer, name):
    return [log[name] for log in trainer.state.log_history if name in log]


def assert_same_run(trainer, plain):
    assert story(trainer) == story(plain)
    # who shares a batch depends on how fast tools are, and the last bit of a logprob on that
    torch.testing.assert_close(parameters(trainer), parameters(plain), atol=1e-4, rtol=0)


# ---- the run goes on ----


@pytest.mark.parametrize("engine", ENGINES)
def test_out_of_memory_in_a_step_costs_a_retry_and_nothing_else(make_trainer, plain, engine):
    trainer = make_trainer(engine, breaker=Breaker(1, out_of_memory_once))
    trainer.train()
    assert_same_run(trainer, plain(engine))
    assert logged(trainer, "engine/retries") == [0.0, 8.0, 0.0]
    assert logged(plain(engine), "engine/retries") == [0.0] * 3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_a_rebuilt_engine_makes_the_run_that_it_would_have_been(
    make_trainer, plain, engine, fault, hanging, capfd
):
    trainer = make_trainer(
        engine,
        breaker=Breaker(1, raising if fault == "raises" else hanging),
        on_engine_death="rebuild",
    )
    first = trainer.rollout_engine
    trainer.train()
    assert_same_run(trainer, plain(engine))
    assert versions(trainer) == versions(plain(engine))
    assert trainer.rollout_engine is not first
    assert first.death == (HUNG if fault == "hangs" else "The engine is closed.")
    assert trainer.rollout_engine.policy_version == 1 + 3
    assert logged(trainer, "engine/rebuilds") == [0.0, 1.0, 1.0]
    lost = records(trainer, trained=False, step=1)
    error = RAISED if fault == "raises" else HUNG
    assert [(r["stop_reason"], r["error"]) for r in lost] == [("engine_error", error)] * 8
    assert f"is dead ({FAILED_ALL}{error})" in capfd.readouterr().out


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rebuilt_engine_samples_with_the_learners_weights(make_trainer, engine):
    trainer = make_trainer(engine, on_engine_death="rebuild")
    with torch.no_grad():  # far from the weights that the engine was built with
        for parameter in trainer.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.manual_seed(0)))
    breaker = Breaker(None, raising)
    breaker.trainer = trainer
    breaker.break_engine()
    trainer._generate_and_score_completions([row for row in rows(2) for _ in range(4)])
    assert trainer.engine_life.num_rebuilds == 1
    batch = collate(trainer.trajectories, trainer.processing_class.pad_token_id)
    with torch.no_grad():
        logits = trainer.model(batch.input_ids, attention_mask=batch.attention_mask).logits
    learner = predicted_logprobs(logits, batch.input_ids) * batch.completion_mask
    assert (learner - batch.old_per_token_logps).abs().max() <= 1e-5
    assert batch.completion_mask.sum() > 0


def test_what_was_finished_before_the_death_is_trained(make_trainer):
    """The engine answers one batch of turns and then nobody."""

    def only_one_batch(step, _):
        answers = iter([step])
        return lambda: next(answers, raising(None))()

    breaker = Breaker(1, only_one_batch)
    trainer = make_trainer(breaker=breaker, on_engine_death="rebuild")
    trainer.train()
    reasons = {r["stop_reason"] for r in records(trainer, step=1, trained=True)}
    lost = records(trainer, step=1, trained=False)
    assert "engine_error" not in reasons and {r["stop_reason"] for r in lost} == {"engine_error"}
    assert 0 < len(lost) < 8 and all(sum(r["completion_mask"]) > 0 for r in lost)
    assert all(r["rewards"] == {"correct_reward": None} for r in lost)
    # no step more failed after those two; the engine is not dead, and its steps work no more
    assert [len(records(trainer, step=2, trained=is_in)) for is_in in (True, False)] == [8, 8]
    assert logged(trainer, "engine/rebuilds") == [0.0, 0.0, 1.0]


# ---- the run stops ----


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stopped_run_is_saved_and_goes_on_as_if_nothing_had_been(
    make_trainer, plain, engine, hanging
):
    trainer = make_trainer(engine, breaker=Breaker(1, hanging))
    with pytest.raises(EngineDeadError) as caught:
        trainer.train()
    trainer.close()
    folder = f"{trainer.args.output_dir}/checkpoint-1"
    assert str(caught.value) == (
        f"The rollout engine is dead: {FAILED_ALL}{HUNG} The run's state is saved: go on in a new "
        f"process with `trainer.train(resume_from_checkpoint={folder!r})`."
    )
    again = make_trainer(engine)
    again.train(resume_from_checkpoint=folder)
    assert_same_run(again, plain(engine))
    assert len(records(again, trained=False)) == 8


def test_a_death_before_the_first_step_can_be_resumed_too(make_trainer, plain):
    trainer = make_trainer(breaker=Breaker(0, raising))
    with pytest.raises(EngineDeadError, match="checkpoint-0"):
        trainer.train()
    trainer.close()
    again = make_trainer()
    again.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-0")
    assert_same_run(again, plain("torch"))


def test_your_own_engine_is_not_rebuilt(make_trainer, agent):
    with TorchRolloutEngine(*agent) as engine:
        trainer = make_trainer(engine, model=agent[0], on_engine_death="rebuild")
        steps_of(engine).step = raising(None)
        with pytest.raises(EngineDeadError, match=re.escape(FAILED_ALL + RAISED)):
            trainer._generate_and_score_completions([row for row in rows(2) for _ in range(4)])
        assert trainer.engine_life.num_rebuilds == 0


def break_every_new_engine(trainer):
    build = trainer.engine_life._build

    def build_broken(name):
        engine = build(name)
        steps_of(engine).step = raising(None)
        return engine

    trainer.engine_life._build = build_broken


def test_a_machine_on_which_every_engine_dies_is_given_up(make_trainer):
    trainer = make_trainer(breaker=Breaker(1, raising), on_engine_death="rebuild")
    break_every_new_engine(trainer)
    with pytest.raises(EngineDeadError, match="It was rebuilt 3 times in a row"):
        trainer.train()
    assert len(records(trainer, step=1)) == 4 * 8
    assert trainer.engine_life.num_rebuilds == 3


def test_a_rollout_in_between_clears_the_count(make_trainer):
    trainer = make_trainer(on_engine_death="rebuild")
    batch = [row for row in rows(2) for _ in range(4)]
    for num_rebuilds in range(1, 6):
        steps_of(trainer.rollout_engine).step = raising(None)
        trainer._generate_and_score_completions(batch)
        assert trainer.engine_life.num_rebuilds == num_rebuilds
        assert StopReason.ENGINE_ERROR not in {t.stop_reason for t in trainer.trajectories}


def test_an_engine_that_can_not_be_built_again_ends_the_run(make_trainer):
    trainer = make_trainer(breaker=Breaker(1, raising), on_engine_death="rebuild")

    def build(name):
        raise RuntimeError("no memory for it")

    trainer.engine_life._build = build
    told = "A new one could not be built: RuntimeError: no memory for it"
    with pytest.raises(EngineDeadError, match=told):
        trainer.train()


# ---- a sync fails ----


class StrictEngine(TorchRolloutEngine):
    """Fails the syncs of these numbers, the one before the first rollout being number 0."""

    def __init__(self, model, tokenizer, *, failing):
        super().__init__(model, tokenizer)
        self.failing, self.num_syncs = failing, 0

    def _load_weights(self, model):
        self.num_syncs += 1
        if self.num_syncs - 1 in self.failing:
            raise torch.OutOfMemoryError("on purpose")
        super()._load_weights(model)


def strict_engine(agent, failing):
    return StrictEngine(*agent, failing=failing)


def test_a_sync_that_fails_once_is_made_up_for_before_the_next_rollout(
    make_trainer, plain, agent, capfd
):
    with strict_engine(agent, failing={1}) as engine:
        trainer = make_trainer(engine, model=agent[0])
        trainer.train()
    assert_same_run(trainer, plain("torch"))
    assert engine.num_syncs == 1 + 3 + 1
    assert capfd.readouterr().out.count("a weight sync failed (OutOfMemoryError: on purpose)") == 1


def test_syncs_that_fail_twice_in_a_row_stop_the_run_with_a_checkpoint(make_trainer, plain, agent):
    with strict_engine(agent, failing={1, 2}) as engine:
        trainer = make_trainer(engine, model=agent[0])
        with pytest.raises(
            EngineDeadError, match=r"in the end with OutOfMemoryError.*checkpoint-1"
        ):
            trainer.train()
    trainer.close()
    again = make_trainer()
    again.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-1")
    assert_same_run(again, plain("torch"))


def test_an_engine_that_can_not_be_synced_is_rebuilt(make_trainer, plain):
    trainer = make_trainer(on_engine_death="rebuild")
    first, strict = trainer.rollout_engine, iter([True, False, False])

    def load(model):
        if next(strict, True):
            return
        raise torch.OutOfMemoryError("on purpose")

    first._load_weights = load
    trainer.train()
    assert_same_run(trainer, plain("torch"))
    assert trainer.rollout_engine is not first
    assert logged(trainer, "engine/rebuilds") == [0.0, 1.0, 1.0]


def test_the_first_sync_that_fails_raises_its_own_error(make_trainer, agent):
    with strict_engine(agent, failing={0}) as engine:
        trainer = make_trainer(engine, model=agent[0])
        with pytest.raises(torch.OutOfMemoryError):
            trainer.train()


# ---- other processes ----


class OtherProcess:
    """The trainer's accelerator beside a process whose flags are given, some for each gather."""

    num_processes = 2
    process_index = 0
    device = torch.device("cpu")

    def __init__(self, *flags):
        self.flags = list(flags)

    def gather(self, mine):
        return torch.cat([mine, torch.tensor([self.flags.pop(0)])])  # [processes, flags]

    def print(self, text):
        self.printed = text


def test_processes_decide_together(make_trainer):
    """The engine here lives; that of the other process has died."""
    trainer = make_trainer()
    life = trainer.engine_life
    life.ensure_current()
    life._accelerator = OtherProcess([True], [True, True])
    version = trainer.rollout_engine.policy_version
    assert life.after_step() == {}  # no sync that the other would not take part in
    assert trainer.rollout_engine.policy_version == version + 1
    with pytest.raises(EngineDeadError, match="it lives, but not those of all other processes"):
        life.ensure_current()
    assert life._accelerator.flags == []


def test_processes_rebuild_together(make_trainer):
    trainer = make_trainer(on_engine_death="rebuild")
    life, first = trainer.engine_life, trainer.rollout_engine
    life._accelerator = OtherProcess([True, True], [False], [False, False])
    life.ensure_current()
    assert life.num_rebuilds == 1
    assert trainer.rollout_engine is not first


@pytest.mark.parametrize("other_lost", [True, False])
def test_a_rollout_is_lost_only_if_it_is_on_all_processes(make_trainer, other_lost):
    trainer = make_trainer()
    life = trainer.engine_life
    current, alive = [False, False], [False, other_lost, other_lost]
    life._accelerator = OtherProcess(current, current, alive)
    life.ensure_current()
    steps_of(trainer.rollout_engine).step = raising(None)
    prompts = [row["prompt"] for row in rows(1)]
    trajectories = rollout_batch(trainer.rollout_engine, trainer.chat_format, prompts, [TOOLS[:1]])
    assert life.is_lost(trajectories) == other_lost
