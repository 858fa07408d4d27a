"""Environments: one instance a trajectory, on threads of its own; none of its troubles spread."""

import asyncio
import threading

import pytest
from fakes import by_prompt, call, user
from worlds import AsyncCounter, AsyncTrouble, Counter, SelfScoring, Trouble, WordGame

from agent_vllm.environments import Environments
from agent_vllm.errors import EnvironmentDefinitionError
from agent_vllm.rollout import rollout_batch
from agent_vllm.settings import Limits
from agent_vllm.tools import workers
from agent_vllm.types import StopReason

INCREMENT = call("increment", step=2)


def row(text="hi", **columns):
    return {"prompt": user(text), **columns}


@pytest.fixture
def made():
    """The instances of `Trouble`, in the order in which they were made."""
    Trouble.made, Trouble.release = [], threading.Event()
    yield Trouble.made
    Trouble.release.set()


@pytest.fixture
def make():
    environments = []

    def build(factories, **options):
        environments.append(Environments(factories, **options))
        return environments[-1]

    yield build
    for each in environments:
        each.close()


def play(environments, engine, chat, rows, **options):
    started = environments.start(rows)
    trajectories = rollout_batch(
        engine,
        chat,
        [s.messages for s in started],
        [s.tools for s in started],
        users_batch=[s.user for s in started],
        failed_batch=[s.error for s in started],
        **options,
    )
    return environments.score(trajectories)


# ---- a life ----


def test_reset_tools_and_reward(make, chat, scripted):
    engine = scripted([f"{INCREMENT}\n{INCREMENT}", "Done."])
    (t,), rewards = play(make(SelfScoring), engine, chat, [row()])
    assert [(r.content, r.status) for r in t.tool_results] == [("2", "ok"), ("4", "ok")]
    assert (t.stop_reason, rewards) == (StopReason.ANSWERED, [4.0])


def test_what_reset_says_ends_the_prompt(make):
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "Play."}]
    given = {"prompt": prompt, "word": "crane"}
    (started,) = make(WordGame).start([given])
    assert started.messages[-1]["content"] == "Play.\nGuess the five letters."
    assert given == {"prompt": prompt, "word": "crane"} and prompt[-1]["content"] == "Play."
    blocks = [{"role": "user", "content": [{"type": "text", "text": "Play."}]}]
    (started,) = make(WordGame).start([{"prompt": blocks}])
    assert [block["text"] for block in started.messages[0]["content"]] == [
        "Play.",
        "\nGuess the five letters.",
    ]


def test_the_environment_may_give_the_whole_prompt(make):
    (started,) = make(WordGame).start([{"word": "crane"}])
    assert started.messages == [{"role": "user", "content": "\nGuess the five letters."}]


def test_the_row_is_the_environments_to_spoil(make):
    class Spoiler(Counter):
        def reset(self, prompt, **kwargs):
            prompt.clear()

    given = row()
    make(Spoiler).start([given])
    assert given == row()


def test_async_environments_keep_their_loop(make, chat, scripted):
    environments = make(AsyncCounter)
    for _ in range(2):  # the second time the instance is used again
        engine = scripted([INCREMENT, "Done."])
        _, rewards = play(environments, engine, chat, [row()])
        assert rewards == [2.0]


def test_several_kinds_by_the_rows_column(make, chat, scripted):
    class Strict(WordGame):
        def reset(self, prompt):  # does not take `environment`
            return super().reset()

    environments = make({"count": SelfScoring, "word": Strict})
    rows = [row("one", environment="word"), row("two", environment="count")]
    engine = scripted(
        by_prompt(
            chat, **{"one\nGuess the five letters.": [call("guess", word="caner"), "a"]}, two=["b"]
        )
    )
    trajectories, rewards = play(environments, engine, chat, rows)
    assert trajectories[0].tool_results[0].content == "GYYYY"
    assert rewards == [None, 0.0]
    with pytest.raises(EnvironmentDefinitionError, match=r"one of \['count', 'word'\], got 'nope'"):
        environments.start([row(environment="nope")])


def test_the_environment_as_the_user(make, chat, scripted):
    class Guest(Counter):
        def get_user_message(self, messages):
            self.increment(1)
            return "more" if self.value < 2 else None

    environments = make(Guest)
    (t,), _ = play(environments, scripted(["a", "b"]), chat, [row()])
    assert [m["content"] for m in t.messages] == ["hi", "a", "more", "b"]
    assert environments.tool_names(None) == ["increment"]


def test_a_user_in_trouble_spoils_its_environment(make, chat, scripted):
    class Guest(Counter):
        def get_user_message(self, messages):
            raise RuntimeError("gone")

    environments = make(Guest)
    (t,), _ = play(environments, scripted(["a"]), chat, [row()])
    assert (t.stop_reason, t.error) == (StopReason.USER_ERROR, "RuntimeError: gone")
    (again,) = environments.start([row()])
    assert again.environment is not environments.examples[None]


class Shelf:
    """Its tools are known once it was reset."""

    def reset(self, items, **kwargs):
        self._items = items

    def get_tools(self):
        def take(item: str) -> str:
            """
            Take something.

            Args:
                item: What.
            """
            return self._items[item]

        given = {"tools": [take], "twice": [take, take], "nothing": None}
        return given[next(iter(self._items))]


def test_tools_that_depend_on_the_row(make, chat, scripted):
    rows = [row("one", items={"tools": "a lamp"}), row("two", items={"twice": ""})]
    take = [call("take", item="tools"), "a"]
    environments = make(Shelf)
    engine = scripted(by_prompt(chat, one=take))
    (t, failed), _ = play(environments, engine, chat, rows)
    assert [(r.content, r.status) for r in t.tool_results] == [("a lamp", "ok")]
    assert "Two tools are named `take`" in failed.error
    (failed,) = environments.start([row(items={"nothing": ""})])
    assert failed.error == "`Shelf.get_tools` must return a list of tools, got NoneType."


# ---- threads ----


def test_what_is_sync_runs_on_one_thread_in_order(make, chat, scripted):
    """As in a plain script: a library that may only be used on one thread, or that calls
    `asyncio.run`, works; calls of one turn don't meet inside of the instance."""

    class Affine(Counter):
        def __init__(self):
            super().__init__()
            self.threads, self.steps = [threading.get_ident()], []

        def reset(self, **kwargs):
            self.threads.append(threading.get_ident())
            return asyncio.run(asyncio.sleep(0, "!"))

        def increment(self, step: int) -> int:
            """
            Add.

            Args:
                step: How much.
            """
            self.steps.append(step)
            threading.Event().wait(0.002 * (5 - step))
            self.steps.append(step)
            self.threads.append(threading.get_ident())
            return step

        def get_reward(self):
            self.threads.append(threading.get_ident())

    environments = make(Affine)
    calls = "\n".join(call("increment", step=step) for step in range(5))
    play(environments, scripted([calls, "Done."]), chat, [row()])
    (used,) = (instance for instance in environments.examples.values())
    assert len(set(used.threads)) == 1 and len(used.threads) == 8
    assert used.steps == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_resets_run_side_by_side(make):
    """Each waits for all: one after another they would never get through."""
    barrier = threading.Barrier(4)

    class Together(Counter):
        def reset(self, **kwargs):
            barrier.wait(20)

    started = make(Together).start([row()] * 4)
    assert [s.error for s in started] == [None] * 4


def test_no_thread_is_left(make):
    make(AsyncCounter).start([row()])  # its event loop is the program's
    before = threading.active_count()
    for is_fresh in (False, True):
        environments = Environments({"a": SelfScoring, "b": AsyncCounter}, is_fresh=is_fresh)
        threads = []
        for _ in range(5):
            environments.start([row(environment=name) for name in "abab"])
            threads.append(threading.active_count())
        assert threads[-1] <= before + 4 + (10 if is_fresh else 0)
        environments.close()
    for thread in threading.enumerate():
        if thread.name == "environment":
            thread.join(5)
    assert threading.active_count() <= before


# ---- used again, or new ----


def test_instances_are_made_once_and_reset_often(make, made):
    environments = make(Trouble)
    for _ in range(3):
        environments.start([row(index=i) for i in range(4)])
    assert sorted(i.indices for i in made) == [[0] * 3, [1] * 3, [2] * 3, [3] * 3]
    environments.start([row(index=0)] * 6)
    assert len(made) == 6


def test_fresh_instances_are_reset_once(make, made):
    environments = make(Trouble, is_fresh=True)
    for _ in range(3):
        environments.start([row(index=i) for i in range(4)])
    assert sorted(instance.indices for instance in made) == [[i] for i in range(4) for _ in "abc"]


# ---- trouble ----

SPOILED = [
    ("reset", "raises", "`{}.reset` failed: RuntimeError: lost the connection"),
    ("reset", "exits", "`{}.reset` failed: SystemExit: 3"),
    ("reset", "sleeps", "`{}.reset` did not return in 1 s."),
    ("reset", "spins", "`{}.reset` did not return in 1 s."),
    (
        "reset",
        "number",
        "`{}.reset` must return a string or None, got int. Rollouts are text only.",
    ),
    ("get_reward", "raises", "`{}.get_reward` failed: RuntimeError: lost the connection"),
    ("get_reward", "sleeps", "`{}.get_reward` did not return in 1 s."),
    (
        "get_reward",
        "text",
        "`{}.get_reward` must return a finite number or None, got 'a lot' (str).",
    ),
    ("get_reward", "nan", "`{}.get_reward` must return a finite number or None, got nan (float)."),
    ("get_reward", "inf", "`{}.get_reward` must return a finite number or None, got inf (float)."),
]


def limit_s(trouble):
    """Short only where something hangs: a busy machine is slow."""
    return 1.0 if trouble in HANGS else 60.0


HANGS = ("sleeps", "spins")  # async methods that hang hold the loop of the others


@pytest.mark.parametrize(
    ("kind", "method", "trouble", "error"),
    [
        (kind, *case)
        for kind in (Trouble, AsyncTrouble)
        for case in SPOILED
        if kind is Trouble or case[1] not in HANGS
    ],
)
def test_trouble_ends_its_own_trajectory(
    make, chat, scripted, made, caplog, kind, method, trouble, error
):
    environments = make(kind, timeout_s=limit_s(trouble))
    rows = [row(index=i, trouble=[method, trouble] if i == 2 else None) for i in range(4)]
    trajectories, rewards = play(environments, scripted(["a"]), chat, rows)
    reasons = [t.stop_reason for t in trajectories]
    expected = [StopReason.ANSWERED] * 4
    expected[2] = StopReason.ENVIRONMENT_ERROR
    assert reasons == expected and rewards == [0.0, 1.0, None, 3.0]
    failed = trajectories[2]
    assert failed.error == error.format(kind.__name__)
    assert bool(failed.num_sampled_tokens) == (method == "get_reward")
    assert failed.prompt_ids == trajectories[0].prompt_ids or method == "reset"
    assert "1 environments failed, 1 so far" in caplog.text and failed.error in caplog.text
    # the next batch is fine, and the one that failed is not in it
    rows = [row(index=i) for i in range(4)]
    trajectories, rewards = play(environments, scripted(["a"]), chat, rows)
    assert rewards == [0.0, 1.0, 2.0, 3.0] and environments.num_failed == 1
    spoiled = [instance for instance in made if len(instance.indices) == 1]
    assert len(made) == 5 and len(spoiled) == 2  # the one that failed and the one in its place


@pytest.mark.parametrize("trouble", HANGS)
def test_an_async_method_that_holds_the_loop_costs_no_later_batch(
    make, chat, scripted, made, caplog, trouble
):
    """The others of its batch may run out of time with it; a loop that stays held is reported."""
    environments = make(AsyncTrouble, timeout_s=1.0)
    rows = [row(index=i, trouble=["reset", trouble] if i == 2 else None) for i in range(4)]
    assert environments.start(rows)[2].error == "`AsyncTrouble.reset` did not return in 1 s."
    _, rewards = play(environments, scripted(["a"]), chat, [row(index=i) for i in range(4)])
    assert rewards == [0.0, 1.0, 2.0, 3.0]
    warned = "A call of `AsyncTrouble` holds the event loop" in caplog.text
    assert warned == (trouble == "sleeps")


def test_async_environments_share_one_loop_over_all_rollouts(make, chat, scripted):
    """As a client needs it that a class holds for all of its instances."""
    lock = asyncio.Lock()
    loops = set()

    class Shares(AsyncCounter):
        async def reset(self, **kwargs) -> None:
            async with lock:  # an error once it waits on another loop
                await asyncio.sleep(0.01)
                loops.add(asyncio.get_running_loop())

    environments = make(Shares, is_fresh=True)
    for _ in range(3):
        assert [s.error for s in environments.start([row()] * 4)] == [None] * 4
    assert len(loops) == 1


class Factory:
    """Makes `Trouble`; what its second call does is up to the test."""

    def __init__(self, second):
        self.second, self.num_calls, self.lock = second, 0, threading.Lock()

    def __call__(self):
        with self.lock:
            self.num_calls += 1
            is_second = self.num_calls == 2
        return self.second() if is_second else Trouble()


def fail():
    raise OSError("no such server")


@pytest.mark.parametrize(
    ("second", "error"),
    [
        (fail, "`Factory` failed: OSError: no such server"),
        (lambda: Trouble.release.wait(20), "`Factory` did not return in 1 s."),
        (object, "Environment `object` must have a method `reset(self, **row)`."),
        (lambda: None, "Environment `NoneType` must have a method `reset(self, **row)`."),
    ],
)
def test_a_factory_that_fails_once(make, chat, scripted, made, second, error):
    environments = make(Factory(second), timeout_s=1.0 if "did not" in error else 60.0)
    rows = [row(index=i) for i in range(4)]
    trajectories, rewards = play(environments, scripted(["a"]), chat, rows)
    (failed,) = (t for t in trajectories if t.stop_reason is StopReason.ENVIRONMENT_ERROR)
    assert failed.error.startswith(error) and rewards.count(None) == 1
    assert (failed.segments, failed.completion_messages) == ([], [])
    _, rewards = play(environments, scripted(["a"]), chat, rows)
    assert rewards == [0.0, 1.0, 2.0, 3.0]


def test_a_call_that_hangs_is_answered_and_its_environment_not_used_again(
    make, chat, scripted, made
):
    environments = make(Trouble)
    looks = f"{call('look')}\n{call('look')}"
    limits = Limits(tool_timeout_s=0.3)
    rows = [row(index=1, trouble=["look", "sleeps"])]
    (t,), rewards = play(environments, scripted([looks, "a"]), chat, rows, limits=limits)
    assert [r.status for r in t.tool_results] == ["failed", "failed"]
    assert (t.stop_reason, rewards) == (StopReason.ANSWERED, [1.0])  # scored by another thread
    environments.start([row(index=5)])
    assert [instance.indices for instance in made] == [[1], [5]]


def test_a_tool_that_raises_spoils_nothing(make, chat, scripted, made):
    environments = make(Trouble)
    rows = [row(index=1, trouble=["look", "raises"])]
    (t,), _ = play(environments, scripted([call("look"), "a"]), chat, rows)
    assert "lost the connection" in t.tool_results[0].content
    environments.start(rows)
    assert len(made) == 1


def test_an_interrupt_stops_the_run(make):
    class Interrupted(Counter):
        def reset(self, **kwargs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(Interrupted).start([row()])


def test_the_others_are_what_they_would_have_been(chat, scripted):
    def sampled(failed):
        engine = scripted(lambda request: [request.seed % 5 + 40, 2])
        trajectories = rollout_batch(
            engine, chat, [user()] * 4, failed_batch=[None, failed, None, None], seed=7
        )
        return [t.completion_ids for t in trajectories]

    whole, partly = sampled(None), sampled("lost")
    assert partly == [whole[0], [], whole[2], whole[3]]


# ---- bad input ----


class NoReset:
    pass


class NoHints(Counter):
    def look(self, where):
        """
        Look.

        Args:
            where: Where.
        """


class NoDocstring(Counter):
    def look(self, where: str) -> str:
        return where


@pytest.mark.parametrize(
    ("factories", "message"),
    [
        (Counter(), r"`environment_factory` must be a class or function .* Give the class itself"),
        ({"a": Counter, "b": 3}, r"`environment_factory\['b'\]` must be a class .* got 3"),
        ({}, "`environment_factory` must hold at least one factory"),
        (NoReset, r"Environment `NoReset` must have a method `reset\(self, \*\*row\)`"),
        (NoHints, "Environment `NoHints` .*`look`.* begin its name with an underscore"),
        (NoDocstring, "Environment `NoDocstring` .*`look`.* begin its name with an underscore"),
        (fail, "`environment_factory` must make an environment: `fail` failed: OSError: no such"),
    ],
)
def test_bad_environments_are_refused(factories, message):
    with pytest.raises(EnvironmentDefinitionError, match=message):
        Environments(factories)


def test_a_batch_of_another_length_is_refused(chat, scripted):
    with pytest.raises(ValueError, match="`failed_batch` must have one length, got 1 and 2"):
        rollout_batch(scripted(["a"]), chat, [user()], failed_batch=[None, None])


def test_a_reward_that_cannot_be_shown_is_one_rows_failure(make, chat, scripted):
    class Unprintable:
        def __repr__(self):
            raise RuntimeError("no text")

    class Game(Counter):
        def get_reward(self):
            return Unprintable()

    (t,), rewards = play(make(Game), scripted(["a"]), chat, [row()])
    assert (t.stop_reason, rewards) == (StopReason.ENVIRONMENT_ERROR, [None])
    assert "must return a finite number or None, got an object (Unprintable)" in t.error


@pytest.mark.parametrize("said", [5, [{"text": 5}], ["text"], b"text"])
def test_a_reset_that_says_no_text_is_one_rows_failure(make, said):
    class Game(Counter):
        def reset(self, **kwargs):
            return said

    (started,) = make(Game).start([row()])
    assert "`Game.reset` must return a string or None" in started.error


def test_what_reset_says_is_added_to_a_message_without_content(make):
    (started,) = make(WordGame).start([{"prompt": [{"role": "user", "content": None}]}])
    assert started.messages == [{"role": "user", "content": "\nGuess the five letters."}]


def test_an_environment_that_gets_no_thread_is_one_rows_failure(make, monkeypatch):
    environments = make(AsyncCounter)

    loops = [asyncio.new_event_loop()]  # enough for the caller's own

    def last():
        if not loops:
            raise OSError(24, "Too many open files")
        return loops.pop()

    monkeypatch.setattr(workers, "_shared_loop", None)  # as in a program's first async call
    monkeypatch.setattr(asyncio, "new_event_loop", last)
    (started,) = environments.start([row()])
    assert "`AsyncCounter.reset` failed: Not run: no event loop could be made" in started.error
