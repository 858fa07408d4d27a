"""Every way in which a trajectory can end, on real engines where one can be made to show it.

Whatever the end: sampled ids are the engine's, ids, mask and logprobs have one length, messages and
ids tell the same story.
"""

import functools
import time

import pytest
from fakes import (
    ADD,
    END,
    NUM_ADD,
    add,
    broken_invariants,
    byte_tokenizer,
    call,
    ids_of,
    shout,
    tail,
    user,
)
from tiny_tasks import SMALL_KINDS, calculator, get_price, get_weather, make_tasks

from agent_vllm import TorchRolloutEngine
from agent_vllm.chat import ChatFormat
from agent_vllm.errors import EngineError
from agent_vllm.rollout import rollout_single
from agent_vllm.settings import Limits
from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.tools import Tool, as_tool
from agent_vllm.types import StopReason

ENGINES = ["torch", pytest.param("vllm", marks=pytest.mark.vllm)]
TOOLS = [calculator, get_weather, get_price]


def check(t, requests):
    """Ids, mask, logprobs, requests and messages of one trajectory agree."""
    assert broken_invariants(t, requests) == []
    roles = [message["role"] for message in t.completion_messages]
    turns = [segment for segment in t.segments if segment.is_sampled]
    assert roles.count("assistant") == len(turns) == t.num_turns
    assert (roles.count("tool") > 0) == any(not segment.is_sampled for segment in t.segments)


# ---- on real engines: the small agent, greedy, calls a tool and answers ----


class Agent:
    """An engine that holds the small agent, and a task that it solves with one call."""

    def __init__(self, engine, monkeypatch):
        self.engine = engine
        self.chat = ChatFormat.from_tokenizer(engine.tokenizer)
        self.requests = []
        sample = engine._sample

        async def recorded(request):
            self.requests.append(request)
            return await sample(request)

        monkeypatch.setattr(engine, "_sample", recorded)
        for task in make_tasks("train", 20, kinds=SMALL_KINDS):
            self.prompt = task["prompt"]
            whole = self.tell()
            if whole.num_turns == 2 and whole.stop_reason is StopReason.ANSWERED:
                self.whole = whole
                return
        raise AssertionError("the agent solves no task with one call")

    def tell(self, chat=None, stop_strings=(), **limits):
        """The task's trajectory under these limits, checked."""
        self.requests.clear()
        t = rollout_single(
            self.engine,
            chat or self.chat,
            self.prompt,
            TOOLS,
            limits=Limits(**limits),
            temperature=0,
            stop_strings=stop_strings,
        )
        check(t, self.requests)
        return t

    @property
    def lengths(self):
        """Tokens of the call's turn, of the observation, of the answer."""
        return [len(segment.token_ids) for segment in self.whole.segments]

    def is_beginning(self, t):
        """Return whether the ids are those of the whole story, up to where it was cut."""
        return self.whole.completion_ids[: len(t.completion_ids)] == t.completion_ids


@pytest.fixture(params=ENGINES)
def solver(request, agent, monkeypatch):
    model, tokenizer = agent
    if request.param == "torch":
        with TorchRolloutEngine(model, tokenizer) as engine:
            yield Agent(engine, monkeypatch)
    else:
        engine = request.getfixturevalue("vllm_engine")
        engine.update_policy(model)
        yield Agent(engine, monkeypatch)


def test_answered(solver):
    t = solver.whole
    assert [segment.is_sampled for segment in t.segments] == [True, False, True]
    assert [s.token_ids[-1] in solver.chat.end_token_ids for s in t.segments] == [True, False, True]
    assert [message["role"] for message in t.completion_messages] == [
        "assistant",
        "tool",
        "assistant",
    ]
    assert not t.unfinished


def test_a_further_end_id_ends_the_turn(solver):
    answer = solver.whole.segments[2].token_ids
    other_end = answer[0]
    chat = ChatFormat.from_tokenizer(solver.engine.tokenizer, eos_token_ids=[other_end])
    if other_end in solver.whole.segments[0].token_ids:
        pytest.skip("the call has this token too")
    t = solver.tell(chat)
    assert t.stop_reason is StopReason.ANSWERED
    assert t.segments[2].token_ids == [other_end]
    assert (t.turn_outputs[1], t.messages[-1]["content"]) == ("", "")


def test_a_stop_string_ends_a_call_and_the_templates_end_is_written(solver):
    t = solver.tell(stop_strings=["</tool_call>"])
    turn = solver.whole.segments[0].token_ids
    assert t.segments[0].token_ids == turn[:-1]
    assert t.segments[1].token_ids == [turn[-1], *solver.whole.segments[1].token_ids]
    assert t.completion_mask[len(turn) - 2 : len(turn)] == [1, 0]
    assert t.completion_ids == solver.whole.completion_ids
    assert t.messages == solver.whole.messages


def test_a_stop_string_ends_an_answer_without_an_end_token(solver):
    answer = solver.whole.turn_outputs[1]
    t = solver.tell(stop_strings=[answer])
    assert t.stop_reason is StopReason.ANSWERED
    assert t.completion_ids[-1] not in solver.chat.end_token_ids
    assert t.messages == solver.whole.messages
    assert solver.is_beginning(t)


@pytest.mark.parametrize("num_missing", [1, 2, 5], ids=["the end", "a mark", "half a call"])
def test_a_turn_is_cut_in_its_call(solver, num_missing):
    t = solver.tell(max_new_tokens=solver.lengths[0] - num_missing)
    assert t.stop_reason is StopReason.TURN_LENGTH
    assert t.completion_mask == [1] * (solver.lengths[0] - num_missing)
    assert (t.tool_results, t.unfinished) == ([], True)
    assert t.messages[-1] == {"role": "assistant", "content": t.turn_outputs[0]}
    assert solver.is_beginning(t)


@pytest.mark.parametrize("limit", ["budget", "context"])
@pytest.mark.parametrize(
    ("where", "num_left", "num_segments"),
    [
        ("in the call", -2, 1),
        ("before the observation", 0, 1),
        ("in the observation", 4, 1),
        ("after the observation", None, 1),
        ("in the answer", None, 3),
    ],
)
def test_the_room_ends(solver, monkeypatch, limit, where, num_left, num_segments):
    """A result that leaves no room for a token stays out of ids and messages alike."""
    num_call, num_observed, _ = solver.lengths
    room = num_call + (num_observed if num_left is None else num_left)
    room += where == "in the answer"
    limits = {}
    if limit == "budget":
        limits["max_completion_tokens"] = room
    else:
        monkeypatch.setattr(solver.engine, "max_model_len", len(solver.whole.prompt_ids) + room)
    t = solver.tell(**limits)
    reasons = {"budget": StopReason.COMPLETION_BUDGET, "context": StopReason.CONTEXT_FULL}
    assert t.stop_reason is reasons[limit]
    assert len(t.segments) == num_segments
    assert len(t.completion_ids) <= room
    assert [r.status for r in t.tool_results] == ([] if where == "in the call" else ["ok"])
    assert solver.is_beginning(t)


def test_no_room_before_the_first_turn(solver, monkeypatch):
    monkeypatch.setattr(solver.engine, "max_model_len", len(solver.whole.prompt_ids))
    t = solver.tell()
    assert (t.stop_reason, t.segments, solver.requests) == (StopReason.CONTEXT_FULL, [], [])


@pytest.mark.parametrize(("max_turns", "num_segments"), [(0, 0), (1, 2), (2, 3)])
def test_max_turns(solver, max_turns, num_segments):
    t = solver.tell(max_turns=max_turns)
    assert len(t.segments) == num_segments
    assert t.stop_reason is (StopReason.ANSWERED if max_turns == 2 else StopReason.MAX_TURNS)
    assert solver.is_beginning(t)


# ---- from a script: what real engines can't be made to show ----


@pytest.fixture
def tell(chat, scripted):
    """A trajectory from its turns, checked."""

    def run(*turns, tools=(add, shout), **limits):
        engine = scripted(list(turns))
        t = rollout_single(engine, chat, user(), list(tools), limits=Limits(**limits))
        lost = t.stop_reason is StopReason.ENGINE_ERROR
        check(t, engine.requests[:-1] if lost else engine.requests)
        return t

    return run


def slow() -> str:
    """Take a moment."""
    time.sleep(0.05)
    return "done"


FINAL = Tool(schema=as_tool(shout).schema, function=shout, ends_episode=True)


@pytest.mark.parametrize(
    ("reason", "turns", "tools", "limits"),
    [
        (StopReason.ANSWERED, [ADD, "3"], [add], {}),
        (StopReason.MAX_TURNS, [ADD], [add], {"max_turns": 3}),
        (StopReason.MAX_TURNS, [ADD], [add], {"max_tool_rounds": 2}),
        (StopReason.TURN_LENGTH, ["x" * 20], [add], {"max_new_tokens": 10}),
        (StopReason.COMPLETION_BUDGET, [ADD], [add], {"max_completion_tokens": 150}),
        (StopReason.CONTEXT_FULL, ["x" * 5000], [add], {}),
        (StopReason.DEADLINE, [call("slow")], [slow], {"deadline_s": 0.01}),
        (StopReason.INVALID_CALLS, [call("nope")], [add], {"max_invalid_calls": 2}),
        (StopReason.ENVIRONMENT_DONE, [call("shout", text="x")], [FINAL], {}),
    ],
)
def test_each_reason(tell, reason, turns, tools, limits):
    t = tell(*turns, tools=tools, **limits)
    assert t.stop_reason is reason
    assert t.error is None


def test_an_engine_error_is_an_ending(chat, scripted):
    turns = iter([[*ids_of(chat.tokenizer, ADD), END]])
    engine = scripted(lambda _: next(turns, EngineError("lost")))
    t = rollout_single(engine, chat, user(), [add])
    check(t, engine.requests[:-2])
    assert (t.stop_reason, t.error) == (StopReason.ENGINE_ERROR, "lost")
    assert [segment.is_sampled for segment in t.segments] == [True, False]


def test_every_reason_is_in_the_list():
    marks = functools.reduce(lambda a, b: a + b, [m.args[1] for m in test_each_reason.pytestmark])
    failures = {reason for reason in StopReason if reason.is_failure}  # shown on their own
    assert {values[0] for values in marks} == set(StopReason) - failures


def test_an_empty_completion_is_an_engines_error_and_retried(chat, scripted):
    turns = iter([[], ids_of(chat.tokenizer, "done"), [], []])
    engine = scripted(lambda _: next(turns))
    retried, failed = (rollout_single(engine, chat, user(), [shout]) for _ in range(2))
    assert retried.stop_reason is StopReason.TURN_LENGTH  # without its end token
    assert retried.turn_outputs == ["done"]
    assert (failed.stop_reason, failed.completion_ids) == (StopReason.ENGINE_ERROR, [])
    assert "sampled 0 tokens" in failed.error


def test_an_end_token_alone_is_an_empty_answer(tell):
    t = tell([END])
    assert (t.stop_reason, t.completion_ids) == (StopReason.ANSWERED, [END])
    assert t.completion_messages == [{"role": "assistant", "content": ""}]


def test_a_turn_cut_inside_a_character_keeps_its_ids():
    tokenizer = byte_tokenizer()
    chat = ChatFormat.from_tokenizer(tokenizer)
    engine = ScriptedRolloutEngine(tokenizer, [call("shout", text="汉" * 9)])
    num_before = len(ids_of(tokenizer, call("shout", text="").partition('""')[0]))
    t = rollout_single(
        engine, chat, user(), [shout], limits=Limits(max_new_tokens=num_before + 1 + 3 + 1)
    )
    check(t, engine.requests)
    assert (t.stop_reason, t.tool_results) == (StopReason.TURN_LENGTH, [])
    assert t.messages[-1]["content"].endswith('"汉�')
    assert t.completion_ids == engine.encode_turn(call("shout", text="汉" * 9))[: num_before + 5]


def test_a_call_cut_before_its_end_is_shown_and_not_run(tell):
    t = tell(ADD, max_new_tokens=NUM_ADD - 1)
    assert (t.stop_reason, t.tool_results) == (StopReason.TURN_LENGTH, [])
    assert t.messages[-1] == {"role": "assistant", "content": ADD}


# ---- overlong results ----


@pytest.mark.parametrize("is_escaped", [True, False])
@pytest.mark.parametrize("max_tokens", range(24, 40))
def test_a_cut_never_splits_a_special_token(tokenizer, is_escaped, max_tokens):
    """Spelled in a result it is text, cut anywhere; as a token it is there whole or not at all."""
    chat = ChatFormat.from_tokenizer(tokenizer, escape_tool_results=is_escaped)
    unit = "ab<|im_end|>"

    def spell(num: int) -> str:
        """
        Spell.

        Args:
            num: how often
        """
        return unit * num

    engine = ScriptedRolloutEngine(tokenizer, [call("spell", num=99), "ok"])
    limits = Limits(max_tool_result_tokens=max_tokens)
    t = rollout_single(engine, chat, user(), [spell], limits=limits)
    check(t, engine.requests)
    shown = t.messages[2]["content"]
    kept, _, mark = shown.partition("\n[... ")
    assert mark.endswith(" tokens cut]")
    assert (unit * 99).startswith(kept)
    assert shown in tail(chat, t)
    num_forged = 0 if is_escaped else kept.count("<|im_end|>")
    assert t.segments[1].token_ids.count(END) == 1 + num_forged
    if not is_escaped:
        assert kept.replace(unit, "") in ("", "a", "ab")
