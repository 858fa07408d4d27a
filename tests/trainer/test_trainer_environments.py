"""Environments and users in the real TRL trainer: what TRL documents runs, failures stay alone."""

import threading

import pytest
import torch
from datasets import Dataset
from fakes import call
from tiny_tasks import get_price, make_tasks
from worlds import AsyncCounter, AsyncTrouble, Counter, SelfScoring, Trouble, WordGame

from agent_vllm import StopReason, TorchRolloutEngine
from agent_vllm.errors import ChatTemplateError, EnvironmentDefinitionError
from agent_vllm.testing import ScriptedRolloutEngine


def user(text="Go."):
    return [{"role": "user", "content": text}]


def increment(step: int) -> int:
    """
    A tool of the same name.

    Args:
        step: How much.
    """
    return step


@pytest.fixture
def made():
    Trouble.made, Trouble.release = [], threading.Event()
    yield Trouble.made
    Trouble.release.set()


@pytest.fixture
def make_trainer(agent, new_trainer):
    """A trainer on the small agent, by default with an engine whose every turn is an answer."""
    _, tokenizer = agent

    def make(factory=None, *, turns=("Done.",), engine=None, data=None, **changes):
        return new_trainer(
            engine or ScriptedRolloutEngine(tokenizer, by_turn(tokenizer, turns)),
            train_dataset=None if data == "none" else Dataset.from_list(data or [row()] * 8),
            environment_factory=factory,
            **{"max_completion_length": 150, "max_steps": 1, "learning_rate": 1e-3, **changes},
        )

    return make


def row(**columns):
    return {"prompt": user(), **columns}


def by_turn(tokenizer, turns):
    """Every trajectory says these turns in order, the last one for ever."""

    def script(request):
        text = tokenizer.decode(request.prompt_ids)
        turn = turns[min(text.count("<|im_start|>assistant") - 1, len(turns) - 1)]
        ids = tokenizer(turn, add_special_tokens=False)["input_ids"]
        return [*ids, tokenizer.eos_token_id]

    return script


def rollout(trainer, data):
    return trainer._generate_and_score_completions(data)


def advantages_by_hand(rewards, num_generations=4):
    """Of one reward a row, NaN for rows that are left out."""
    groups = torch.tensor(rewards).view(-1, num_generations)
    mean = groups.nanmean(1, keepdim=True)
    deviation = groups - mean
    num = (~groups.isnan()).sum(1, keepdim=True)
    std = (deviation.nan_to_num() ** 2).sum(1, keepdim=True).div(num - 1).sqrt()
    return (deviation / (std + 1e-4)).nan_to_num().flatten()


# ---- what TRL documents ----

INCREMENT = call("increment", step=2)


def counted(environments, **kwargs):
    return [float(environment.value) for environment in environments]


def won(environments, **kwargs):
    return [environment.reward for environment in environments]


ROUTED = [row(environment=name) for name in ("count", "word") for _ in range(4)]

DOCUMENTED = {
    "a state, scored by a reward function": (
        {"factory": Counter, "reward_funcs": counted, "turns": (INCREMENT, INCREMENT, "Done.")},
        [[4.0]] * 8,
    ),
    "a game whose end is an error, one call after it": (
        {
            "factory": WordGame,
            "reward_funcs": [won],
            "data": [row(word="crane")] * 8,
            "turns": (call("guess", word="crane"), call("guess", word="crane"), "Done."),
        },
        [[1.0]] * 8,
    ),
    "a reward of its own": (
        {"factory": SelfScoring, "turns": (INCREMENT, "Done.")},
        [[2.0]] * 8,
    ),
    "all of it async, beside a reward function": (
        {"factory": AsyncCounter, "reward_funcs": counted, "turns": (INCREMENT, "Done.")},
        [[2.0, 2.0]] * 8,
    ),
    "a lambda": ({"factory": lambda: SelfScoring()}, [[0.0]] * 8),
    "a prompt of its own, no dataset": (
        {
            "factory": WordGame,
            "reward_funcs": won,
            "data": "none",
            "turns": (call("guess", word="crane"), "Done."),
        },
        [[1.0]] * 8,
    ),
    "several by name, one of which scores itself": (
        {
            "factory": {"count": SelfScoring, "word": WordGame},
            "reward_funcs": lambda environments, **_: [
                e.reward if isinstance(e, WordGame) else None for e in environments
            ],
            "data": ROUTED,
            "turns": (f"{INCREMENT}\n{call('guess', word='crane')}", "Done."),
            "shuffle_dataset": False,
        },
        None,
    ),
}


@pytest.mark.parametrize("case", DOCUMENTED)
def test_what_trl_documents_trains(make_trainer, case):
    changes, rewards = DOCUMENTED[case]
    trainer = make_trainer(**changes)
    trainer.train()
    assert {t.stop_reason for t in trainer.trajectories} == {StopReason.ANSWERED}
    if rewards is not None:
        assert trainer.rollout.rewards.tolist() == rewards


class Shop:
    """For the agent of the tests, which knows how to ask for prices."""

    def reset(self, answer, **kwargs) -> None:
        self._num_asked = 0

    def get_price(self, item: str) -> str:
        """
        Looks up the price of an item in the shop.

        Args:
            item: The item's name.
        """
        self._num_asked += 1
        return get_price(item)

    def get_reward(self) -> float:
        return float(self._num_asked)


@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_real_policy_acts_in_its_environment(make_trainer, agent, request, engine):
    if engine == "vllm":
        engine = request.getfixturevalue("vllm_engine")
    else:
        engine = TorchRolloutEngine(*agent)
    trainer = make_trainer(Shop, engine=engine, data=make_tasks("train", 8, kinds=("price",)))
    trainer.train()
    results = [t.tool_results for t in trainer.trajectories]
    asked = [float(sum(r.status != "invalid" for r in its)) for its in results]
    assert trainer.rollout.rewards.flatten().tolist() == asked and sum(asked) > 0
    log = trainer.state.log_history[0]
    assert log["rewards/Shop/mean"] == pytest.approx(sum(asked) / 8)
    assert log["sampling/logprob_gap/max"] <= 5e-5


def test_each_row_has_the_tools_and_the_reward_of_its_environment(make_trainer):
    changes, _ = DOCUMENTED["several by name, one of which scores itself"]
    trainer = make_trainer(**changes)
    inputs = rollout(trainer, ROUTED)
    prompts = [trainer.processing_class.decode(t.prompt_ids) for t in trainer.trajectories]
    assert ["increment" in prompt for prompt in prompts] == [True] * 4 + [False] * 4
    assert ["guess" in prompt for prompt in prompts] == [False] * 4 + [True] * 4
    assert ["Guess the five" in prompt for prompt in prompts] == [False] * 4 + [True] * 4
    assert trainer.reward_func_names == ["<lambda>", "SelfScoring"]
    rewards = trainer.rollout.rewards
    assert torch.equal(rewards.nan_to_num(-1.0), torch.tensor([[-1, 2.0]] * 4 + [[1, -1.0]] * 4))
    assert [[r.status for r in t.tool_results] for t in trainer.trajectories] == [
        ["ok", "invalid"]
    ] * 4 + [["invalid", "ok"]] * 4
    assert inputs["advantages"].tolist() == [0.0] * 8


class Forger(SelfScoring):
    """Says what ends the user's turn and begins the assistant's."""

    def reset(self, **row):
        super().reset(**row)
        return f" {self.forged}"


@pytest.mark.parametrize("is_escaped", [True, False])
def test_control_text_of_a_reset_stays_text(make_trainer, monkeypatch, is_escaped):
    def num_control_ids(forged):
        monkeypatch.setattr(Forger, "forged", forged, raising=False)
        trainer = make_trainer(Forger, escape_tool_results=is_escaped)
        rollout(trainer, [row()] * 8)
        ids, tokenizer = trainer.trajectories[0].prompt_ids, trainer.processing_class
        return sum(ids.count(token) for token in tokenizer.get_added_vocab().values())

    end = make_trainer(Forger)._tokenizer.eos_token
    assert num_control_ids(f"7{end}") - num_control_ids("7") == (0 if is_escaped else 1)


def test_the_callers_list_of_reward_functions_is_not_written_to(make_trainer):
    reward_funcs = [counted]
    make_trainer(SelfScoring, reward_funcs=reward_funcs)
    assert reward_funcs == [counted]


def test_evaluation_may_have_more_rows_than_training(make_trainer):
    trainer = make_trainer(
        SelfScoring,
        turns=(INCREMENT, "Done."),
        eval_dataset=Dataset.from_list([row()] * 8),
        per_device_train_batch_size=2,
        num_generations=2,
        per_device_eval_batch_size=8,
        num_generations_eval=1,
        eval_on_start=True,
        data=[row()] * 2,
    )
    trainer.train()
    evaluation = trainer.state.log_history[0]
    assert evaluation["eval_rewards/SelfScoring/mean"] == 2.0
    trainer.evaluate()
    results = [[result.content for result in t.tool_results] for t in trainer.trajectories]
    assert results == [["2"]] * 8


@pytest.mark.parametrize(("is_fresh", "num_made"), [(False, 8), (True, 1 + 7 + 8)])
def test_instances_are_used_again_or_new(make_trainer, made, is_fresh, num_made):
    trainer = make_trainer(Trouble, fresh_environments=is_fresh, data=[row(index=0)])
    for _ in range(2):
        rollout(trainer, [row(index=0)] * 8)
    assert len(made) == num_made
    assert len(set(map(id, trainer.environments))) == 8


# ---- trouble ----


@pytest.mark.parametrize(
    ("kind", "trouble"),
    [
        (Trouble, ("reset", "sleeps")),  # async, it would hold the loop of the others
        *(
            (kind, trouble)
            for kind in (Trouble, AsyncTrouble)
            for trouble in [
                ("reset", "raises"),
                ("reset", "number"),
                ("get_reward", "raises"),
                ("get_reward", "text"),
            ]
        ),
    ],
)
def test_one_of_eight_fails_alone(make_trainer, made, kind, trouble):
    """Its group's baseline is that of the other three, and every other row is as it was."""

    def length(completions, index, environments, **kwargs):
        assert not any(environment is None for environment in environments)
        return [10.0 * i for i in index]

    limit_s = 1.0 if trouble[1] == "sleeps" else 60.0
    trainer = make_trainer(
        kind, reward_funcs=length, environment_timeout_s=limit_s, data=[row(index=0, trouble=None)]
    )
    data = [row(index=i, trouble=trouble if i == 2 else None) for i in range(8)]
    inputs = rollout(trainer, data)
    reasons = [t.stop_reason for t in trainer.trajectories]
    assert [reason is StopReason.ENVIRONMENT_ERROR for reason in reasons] == [
        i == 2 for i in range(8)
    ]
    nan = float("nan")
    totals = [11.0 * i if i != 2 else nan for i in range(8)]
    torch.testing.assert_close(inputs["advantages"], advantages_by_hand(totals))
    assert trainer.rollout.rewards.isnan().all(1).tolist() == [i == 2 for i in range(8)]
    trained = (inputs["completion_mask"] * inputs["tool_mask"]).sum(1)
    sampled = [t.num_sampled_tokens for t in trainer.trajectories]
    assert trained.tolist() == [n if i != 2 else 0 for i, n in enumerate(sampled)]
    assert (sampled[2] == 0) == (trouble[0] == "reset")
    metrics = trainer._metrics[trainer._mode]
    assert metrics["rollout/stop_reason/environment_error"] == [1 / 8]
    assert metrics["rollout/failed_tokens"] == [float(sampled[2])]
    # the next batch is whole
    inputs = rollout(trainer, [row(index=i, trouble=None) for i in range(8)])
    totals = [11.0 * i for i in range(8)]
    torch.testing.assert_close(inputs["advantages"], advantages_by_hand(totals))
    assert {t.stop_reason for t in trainer.trajectories} == {StopReason.ANSWERED}


def test_a_factory_that_fails_once(make_trainer, made):
    lock, calls = threading.Lock(), []

    def factory():
        with lock:
            calls.append(None)
            if len(calls) == 4:
                raise OSError("no such server")
        return Trouble()

    trainer = make_trainer(factory, data=[row(index=0)])
    rollout(trainer, [row(index=i) for i in range(8)])
    (failed,) = (t for t in trainer.trajectories if t.stop_reason.is_failure)
    assert failed.error.endswith("factory` failed: OSError: no such server")
    rollout(trainer, [row(index=i) for i in range(8)])
    assert trainer.rollout.rewards.flatten().tolist() == [float(i) for i in range(8)]


def test_all_fail_and_the_weights_stay_as_they_are(make_trainer, made):
    trainer = make_trainer(
        Trouble, data=[row(index=0, trouble=["reset", "raises"])] * 8, max_steps=2, weight_decay=0.0
    )
    before = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
    trainer.train()
    after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    assert torch.equal(before, after)
    assert trainer.state.log_history[0]["loss"] == 0.0
    assert trainer.state.log_history[1]["rollout/stop_reason/environment_error"] == 1.0


def test_the_others_sample_what_they_would_have(make_trainer, agent, made):
    """On a real policy: one environment's trouble moves no token of another's trajectory."""

    def sampled(trouble):
        trainer = make_trainer(
            Trouble, engine=TorchRolloutEngine(*agent), data=[row(index=0, trouble=None)]
        )
        rollout(trainer, [row(index=0, trouble=trouble if i == 1 else None) for i in range(8)])
        return [t.completion_ids for t in trainer.trajectories]

    whole, partly = sampled(None), sampled(("reset", "raises"))
    assert partly == [whole[0], [], *whole[2:]]


def test_reward_functions_see_no_failures_and_speak_of_their_own_rows(make_trainer, made):
    seen = {}

    async def look(completions, index, log_extra, log_metric, trainer_state, **columns):
        seen.update(index=index, **{name: len(column) for name, column in columns.items()})
        log_extra("length", [len(completion) for completion in completions])
        return [float(i) if i else None for i in index]

    trainer = make_trainer(Trouble, reward_funcs=look, data=[row(index=0, trouble=None)])
    data = [row(index=i, trouble=("reset", "raises") if i == 5 else None) for i in range(8)]
    rollout(trainer, data)
    assert seen.pop("index") == [0, 1, 2, 3, 4, 6, 7]
    assert set(seen.values()) == {7} and {"environments", "prompts", "stop_reason"} <= seen.keys()
    assert trainer.rollout.rewards[:, 0].nan_to_num(-1).tolist() == [-1, 1, 2, 3, 4, -1, 6, 7]
    assert list(trainer._logs["extra"]["length"]) == [1, 1, 1, 1, 1, None, 1, 1]


def test_a_reward_function_of_another_length_is_refused(make_trainer, made):
    trainer = make_trainer(
        Trouble, reward_funcs=lambda **_: [1.0] * 8, data=[row(index=0, trouble=None)]
    )
    data = [row(index=i, trouble=("reset", "raises") if i == 5 else None) for i in range(8)]
    with pytest.raises(ValueError, match="one reward for each completion, got 8 for 7"):
        rollout(trainer, data)


# ---- users ----


def test_the_environment_may_be_the_user(make_trainer):
    class Guest(Counter):
        def get_user_message(self, messages):
            self.increment(1)
            return f"again {self.value}" if self.value < 3 else None

    trainer = make_trainer(Guest, reward_funcs=counted)
    trainer.train()
    said = [m["content"] for m in trainer.trajectories[0].messages if m["role"] == "user"]
    assert said == ["Go.", "again 1", "again 2"]
    assert trainer.rollout.rewards.tolist() == [[3.0]] * 8
    assert "get_user_message" not in trainer.processing_class.decode(
        trainer.trajectories[0].prompt_ids
    )


def test_a_user_for_each_row(make_trainer):
    def guest(row):
        rest = list(row["says"])
        return lambda messages: rest.pop(0) if rest else None

    def turns(num_turns, **kwargs):
        return [float(n) for n in num_turns]

    trainer = make_trainer(
        user=guest,
        tools=[increment],
        reward_funcs=turns,
        turns=(call("increment", step=1), "Done."),
        data=[row(says=["more", "and more"])] * 8,
    )
    trainer.train()
    assert trainer.rollout.rewards.tolist() == [[4.0]] * 8
    roles = [m["role"] for m in trainer.trajectories[0].completion_messages]
    assert roles == ["assistant", "tool", "assistant", "user", "assistant", "user", "assistant"]
    assert trainer.state.log_history[0]["tools/increment/call_frequency"] == 1.0


def test_a_row_may_have_no_user_or_one_in_trouble(make_trainer):
    def guest(row):
        if row["index"] == 0:
            return None
        if row["index"] == 1:
            raise OSError("no such guest")
        return lambda messages: None

    trainer = make_trainer(
        user=guest, reward_funcs=lambda index, **_: list(map(float, index)), data=[row(index=2)]
    )
    inputs = rollout(trainer, [row(index=i) for i in range(8)])
    reasons = [t.stop_reason for t in trainer.trajectories]
    assert reasons == [StopReason.USER_ERROR if i == 1 else StopReason.ANSWERED for i in range(8)]
    assert trainer.trajectories[1].error == "OSError: no such guest"
    totals = [float(i) if i != 1 else float("nan") for i in range(8)]
    torch.testing.assert_close(inputs["advantages"], advantages_by_hand(totals))


# ---- bad input ----


class Guest(Counter):
    def get_user_message(self, messages):
        return None


class Narrow(SelfScoring):
    def reset(self, prompt):
        pass


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"factory": Counter()}, EnvironmentDefinitionError, "Give the class itself"),
        ({"factory": object}, EnvironmentDefinitionError, r"`object` must have a method `reset"),
        (
            {"factory": {"count": SelfScoring}},
            EnvironmentDefinitionError,
            r"`train_dataset` must have a column 'environment', got \['prompt'\]",
        ),
        (
            {
                "factory": {"count": SelfScoring, "word": WordGame},
                "data": [row(environment="wrod")],
            },
            EnvironmentDefinitionError,
            r"`environment` must be one of \['count', 'word'\], got 'wrod'. Correct the column",
        ),
        (
            {"factory": SelfScoring, "eval_dataset": {"a": Dataset.from_dict({"prompt": []})}},
            ValueError,
            r"`eval_dataset\['a'\]` is empty",
        ),
        (
            {"factory": SelfScoring, "tools": [increment]},
            EnvironmentDefinitionError,
            "got 'increment', which `SelfScoring` has too. .* rename one",
        ),
        (
            {"factory": Narrow, "data": [row(index=1)]},
            EnvironmentDefinitionError,
            r"`Narrow.reset` must take the columns of `train_dataset`, \['prompt', 'index'\]: got "
            r"an unexpected keyword argument 'index'. Give it `\*\*kwargs`",
        ),
        ({"factory": Guest, "user": print}, EnvironmentDefinitionError, "`user` must be left out"),
        ({"user": "Bob"}, TypeError, "`user` must be a function from a dataset row .* got 'Bob'"),
        ({"factory": Counter, "environment_timeout_s": 0}, ValueError, "`environment_timeout_s`"),
        (
            {"factory": SelfScoring, "data": [{"prompt": "Go."}]},
            ValueError,
            "conversational prompts",
        ),
    ],
)
def test_bad_input_is_refused_by_name(make_trainer, changes, error, message):
    with pytest.raises(error, match=message):
        make_trainer(**{"reward_funcs": None, **changes})


def test_a_template_that_users_can_not_be_used_with_is_refused(make_trainer, agent):
    agent[1].chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    with pytest.raises(ChatTemplateError, match="writes no end token between an answer and"):
        make_trainer(user=lambda row: None, reward_funcs=lambda prompts, **_: [0.0] * len(prompts))
