"""Hostile objects at every boundary: each gives one result, and neighbours have their own."""

import asyncio
import json
import logging
from collections import Counter

import hostile_objects
import pytest
from fakes import call, ids_of, user
from tool_calls import ask, run, tool

from agent_vllm.environments import Environments
from agent_vllm.rollout import rollout_batch
from agent_vllm.settings import Limits
from agent_vllm.types import StopReason

TIMEOUT_S = 3.0  # what never ends costs this once per test


def returning(make):
    return lambda *_: make()


def raising(make):
    def work(*_):
        raise make()

    return work


ACTIONS = {f"returns: {name}": returning(make) for name, make in hostile_objects.VALUES.items()}
ACTIONS |= {f"raises: {name}": raising(make) for name, make in hostile_objects.ERRORS.items()}


# ---- tool calls ----


def on_thread(action):
    return lambda: action()


def on_loop(action):
    async def work():
        return action()

    return work


def as_awaitable(action):
    return lambda: on_loop(action)()


def as_generator(action):
    def work():
        yield action()

    return work


def in_clean_up(action):
    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            action()

    return work


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Keep what clean-up raises out of the reports, which must be text that can be encoded."""
    caplog.set_level(logging.CRITICAL + 1, logger="asyncio")


@pytest.mark.filterwarnings("ignore")  # coroutines that nobody awaits, objects that refuse to go
@pytest.mark.parametrize(
    "kind", [on_thread, on_loop, as_awaitable, as_generator, in_clean_up], ids=lambda k: k.__name__
)
def test_a_tool_call_ends_in_one_result(kind):
    tools = [tool(kind(action), f"f{number}") for number, action in enumerate(ACTIONS.values())]
    tools.append(tool(lambda: "fine", "fine"))
    calls = [ask(t.schema["function"]["name"]) for t in tools]
    results = run(calls, tools, timeout_s=TIMEOUT_S)
    *hostile, last = results
    assert last == ("ok", "fine")
    for name, (status, content) in zip(ACTIONS, hostile, strict=True):
        assert type(content) is str and status in ("ok", "failed"), name
        assert len(content) < 300_000 and content.encode(), name
        if status == "failed":
            assert json.loads(content).keys() == {"error"}, name
        assert status == "failed" or name.startswith("returns") or kind is as_generator, name


# ---- environments and users ----


class World:
    """Acts where and as its row says; else it is a plain environment."""

    def reset(self, place="", action=None, **_):
        self.place, self.action = place, action
        return self._at("reset", None)

    def look(self) -> str:
        """Look around."""
        return self._at("look", "seen")

    def get_tools(self):
        if self.place == "an item of get_tools":
            return [self.action()]
        return self._at("get_tools", [])

    def get_reward(self):
        return self._at("get_reward", 1.0)

    def get_user_message(self, messages):
        return self._at("get_user_message", None)

    def _at(self, place, otherwise):
        return self.action() if self.place == place else otherwise


class AsyncWorld(World):
    async def reset(self, **row):
        return super().reset(**row)

    async def look(self) -> str:
        """Look around."""
        return super().look()

    async def get_tools(self):
        return super().get_tools()

    async def get_reward(self):
        return super().get_reward()

    async def get_user_message(self, messages):
        return super().get_user_message(messages)


def play(environments, chat, scripted, rows):
    """One call of `look`, one answer; returns the trajectories and their rewards."""
    look = [*ids_of(chat.tokenizer, call("look")), chat.end_token_ids[0]]
    answer = [*ids_of(chat.tokenizer, "Done."), chat.end_token_ids[0]]
    started = environments.start(rows, chat.as_data)
    trajectories = rollout_batch(
        scripted(lambda r: answer if call("look") in chat.tokenizer.decode(r.prompt_ids) else look),
        chat,
        [s.messages for s in started],
        [s.tools for s in started],
        users_batch=[s.user for s in started],
        failed_batch=[s.error for s in started],
        limits=Limits(tool_timeout_s=TIMEOUT_S, max_tool_result_tokens=60),
    )
    return environments.score(trajectories)


def never_ends(action):
    return "endless" in action or "never" in action


def check(actions, trajectories, rewards, stop_reasons):
    """The first ones are in trouble, the last one is not."""
    *hostile, neighbour = zip(trajectories, rewards, strict=True)
    (t, reward) = neighbour
    assert (t.stop_reason, reward) == (StopReason.ANSWERED, 1.0)
    assert [(r.status, r.content) for r in t.tool_results] == [("ok", "seen")]
    for name, (t, reward) in zip(actions, hostile, strict=True):
        assert t.stop_reason in stop_reasons, (name, t.stop_reason, t.error)
        assert reward is None or type(reward) is float, name
        assert t.error is None or (type(t.error) is str and len(t.error) < 300_000), name
        if name.startswith("raises"):
            assert t.stop_reason is stop_reasons[0], name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [World, AsyncWorld])
@pytest.mark.parametrize(
    ("place", "stop_reason"),
    [
        ("reset", StopReason.ENVIRONMENT_ERROR),
        ("look", StopReason.ANSWERED),
        ("get_tools", StopReason.ENVIRONMENT_ERROR),
        ("an item of get_tools", StopReason.ENVIRONMENT_ERROR),
        ("get_reward", StopReason.ENVIRONMENT_ERROR),
        ("get_user_message", StopReason.USER_ERROR),
    ],
)
def test_an_environment_fails_alone(chat, scripted, kind, place, stop_reason):
    is_limited = kind is World and place == "look"  # by the limit of a tool call
    actions = {name: a for name, a in ACTIONS.items() if is_limited or not never_ends(name)}
    trouble = [{"place": place, "action": action} for action in actions.values()]
    rows = [{"prompt": user(), **row} for row in [*trouble, {}]]
    with Environments(kind, timeout_s=60) as environments:
        trajectories, rewards = play(environments, chat, scripted, rows)
    check(actions, trajectories, rewards, [stop_reason, StopReason.ANSWERED])


@pytest.mark.filterwarnings("ignore")
def test_a_factory_fails_alone(chat, scripted):
    made = iter([World, *ACTIONS.values(), World])
    with Environments(lambda: next(made)(), is_fresh=True, timeout_s=60) as environments:
        rows = [{"prompt": user()}] * (len(ACTIONS) + 2)
        trajectories, rewards = play(environments, chat, scripted, rows)
    ends = Counter(zip([t.stop_reason for t in trajectories], rewards, strict=True))
    assert ends == {
        (StopReason.ENVIRONMENT_ERROR, None): len(ACTIONS),
        (StopReason.ANSWERED, 1.0): 2,
    }
