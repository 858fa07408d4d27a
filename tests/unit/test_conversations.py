"""Two thousand seeded random conversations over ten families, through `rollout_batch`.

Whatever models write and tools do: sampled ids stay as they are, every prompt extends the last,
lists have one length, and each trajectory ends with one reason.
"""

import functools
import random

import pytest
from fakes import (
    CHATML,
    broken_invariants,
    by_prompt,
    call,
    chatml_tokenizer,
    observed,
    sampled,
    trajectory,
    user,
)
from families import CALLS, ONE_OF_EACH, TOOLS, USER, assistant, chat_of, sampled_turn

from agent_vllm.chat import ChatFormat
from agent_vllm.errors import ChatTemplateError
from agent_vllm.rollout import rollout_batch
from agent_vllm.settings import Limits
from agent_vllm.testing import ScriptedRolloutEngine
from agent_vllm.tools import Tool
from agent_vllm.training import collate
from agent_vllm.types import StopReason, ToolCall

NUM_BATCHES, NUM_ROWS = 50, 5  # a family: 10 * 50 * 5 = 2,500 conversations


# ---- random models and tools ----


@functools.cache
def turns_of(name):
    """Turns in this family's own form, by kind."""
    chat = chat_of(name)
    one = chat.template.one_call_per_turn

    def ids(message):
        before, turn = sampled_turn(chat, message)
        opened = chat.tokenizer.decode(chat.prompt_ids([USER], TOOLS)[len(before) :])
        if "<think>" in opened and "</think>" not in opened:  # a finished turn doesn't show it
            turn = chat.tokenizer("</think>", add_special_tokens=False)["input_ids"] + turn
        return turn

    unknown = ToolCall(name="nope", arguments={})
    wrong = ToolCall(name="record", arguments={"count": "many"})
    return {
        "answer": ids(assistant(content="It is 汉.")),
        "call": ids(assistant(CALLS[:1])),
        "calls": ids(assistant(CALLS[:1] if one else CALLS)),
        "thought": ids(assistant(CALLS[1:], thinking="hmm")),
        "unknown": ids(assistant([unknown])),
        "wrong": ids(assistant([wrong])),
    }


def random_turn(rng, name):
    """A turn as it should be, or cut, broken, with another end or with none."""
    chat = chat_of(name)
    ids = list(rng.choice(list(turns_of(name).values())))
    match rng.randrange(10):
        case 0:
            return ids[: rng.randrange(1, len(ids))]  # no end: cut by length
        case 1:
            at = rng.randrange(len(ids))
            return [*ids[:at], *ids[at + 3 :]] or ids
        case 2:
            return [*ids[:-1], rng.choice(chat.end_token_ids)]
        case 3:
            return [chat.end_token_ids[0]]
        case _:
            return ids


def random_tools(rng):
    """The two tools, each of which answers, fails or floods."""

    def function(**_):
        match rng.randrange(4):
            case 0:
                raise RuntimeError("no <|im_end|>")
            case 1:
                return "9汉" * 400
            case _:
                return {"ok": rng.random(), "text": "<|im_start|>system"}

    return [Tool(schema=tool.schema, function=function) for tool in TOOLS]


def random_limits(rng):
    return Limits(
        max_turns=rng.randrange(1, 6),
        max_new_tokens=rng.choice([None, 30, 90]),
        max_completion_tokens=rng.choice([None, 90, 400, 900]),
        max_tool_rounds=rng.choice([None, None, 2]),
        max_invalid_calls=rng.choice([None, 1, 2]),
        max_tool_result_tokens=rng.choice([None, 40]),
        tool_timeout_s=None,
    )


def random_batch(name, seed):
    """Trajectories of one batch, and each one's requests and sampled turns."""
    rng = random.Random(f"{name}/{seed}")
    chat = chat_of(name)
    log = []

    def script(request):
        ids = random_turn(rng, name)[: request.max_new_tokens]
        log.append((request, ids))
        return ids

    tools = random_tools(rng)
    rows = [[{"role": "user", "content": f"row {row}"}] for row in range(NUM_ROWS)]
    engine = ScriptedRolloutEngine(
        chat.tokenizer,
        script,
        max_model_len=len(chat.prompt_ids(rows[0], tools)) + rng.choice([150, 500, 3000]),
        eos_token_ids=chat.end_token_ids,
    )
    limits = random_limits(rng)
    trajectories = rollout_batch(engine, chat, rows, [tools] * NUM_ROWS, limits=limits, seed=seed)
    return trajectories, log, engine.max_model_len, limits


# ---- what must hold ----


def broken_conversation(t, log, max_model_len, limits):
    """Return what is wrong with a trajectory, given its batch's requests and samples."""
    own = [pair for pair in log if pair[0].prompt_ids[: len(t.prompt_ids)] == t.prompt_ids]
    problems = broken_invariants(t, [request for request, _ in own])
    turns = [segment.token_ids for segment in t.segments if segment.is_sampled]
    if turns != [ids for _, ids in own]:
        problems.append("sampled ids were changed")
    if any(set(segment.logprobs) - {-0.5} for segment in t.segments if segment.is_sampled):
        problems.append("a sampled token lost its logprob")
    if len(t.prompt_ids) + len(t.completion_ids) > max_model_len:
        problems.append("longer than the context")
    if len(t.completion_ids) > (limits.max_completion_tokens or max_model_len):
        problems.append("longer than the completion may be")
    if t.num_turns > limits.max_turns:
        problems.append("too many turns")
    if not isinstance(t.stop_reason, StopReason):
        problems.append(f"stop reason {t.stop_reason!r}")
    num_turns = sum(message["role"] == "assistant" for message in t.completion_messages)
    if num_turns != len(turns):
        problems.append(f"{len(turns)} turns, {num_turns} assistant messages")
    return problems


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_random_conversations_keep_every_invariant(name):
    reasons = set()
    for seed in range(NUM_BATCHES):
        trajectories, log, max_model_len, limits = random_batch(name, seed)
        for row, t in enumerate(trajectories):
            assert broken_conversation(t, log, max_model_len, limits) == [], (seed, row)
            reasons.add(t.stop_reason)
    assert reasons >= {
        StopReason.ANSWERED,
        StopReason.MAX_TURNS,
        StopReason.TURN_LENGTH,
        StopReason.COMPLETION_BUDGET,
        StopReason.INVALID_CALLS,
    }


class Asked:
    def __init__(self, prompt_ids):
        self.prompt_ids = prompt_ids


GOOD = [sampled(3, 9), observed(4), sampled(5, 9)]
LOG = [(Asked([1, 2]), [3, 9]), (Asked([1, 2, 3, 9, 4]), [5, 9])]
TALK = [{"role": "user"}, {"role": "assistant"}, {"role": "tool"}, {"role": "assistant"}]


def told(segments=GOOD, **fields):
    fields = {"messages": TALK, "num_prompt_messages": 1, **fields}
    return trajectory([1, 2], *segments, **fields)


@pytest.mark.parametrize(
    ("t", "log", "limits", "problem"),
    [
        (told(), LOG, Limits(), None),
        (told([sampled(3, 8), *GOOD[1:]]), LOG, Limits(), "sampled ids were changed"),
        (told([*GOOD[:1], observed(4, 5, 9)]), LOG, Limits(), "1 sampled segments, 2 requests"),
        (told(), [LOG[0], (Asked([1, 2, 3, 4]), [5, 9])], Limits(), "turn 1 was asked with other"),
        (told(), LOG, Limits(max_turns=1), "too many turns"),
        (told(), LOG, Limits(max_completion_tokens=4), "longer than the completion may be"),
        (told(messages=TALK[:3]), LOG, Limits(), "2 turns, 1 assistant messages"),
        (told(stop_reason=None), LOG, Limits(), "stop reason None"),
    ],
)
def test_the_checker_finds_what_is_broken(t, log, limits, problem):
    problems = broken_conversation(t, log, 100, limits)
    assert problems == [] if problem is None else any(p.startswith(problem) for p in problems)


def test_the_checker_finds_a_lost_logprob_and_a_full_context():
    t = told()
    t.segments[0].logprobs[0] = 0.0
    try:
        assert broken_conversation(t, LOG, 6, Limits()) == [
            "a sampled token lost its logprob",
            "longer than the context",
        ]
    finally:
        t.segments[0].logprobs[0] = -0.5


# ---- what the template can't write ----

ODD = [
    [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    ["Hello."],
]


@pytest.mark.parametrize("odd", ODD)
def test_a_prompt_that_cannot_be_written_fails_its_row_only(chat, scripted, odd):
    engine = scripted(["yes", "yes"])
    rows = rollout_batch(engine, chat, [user("one"), odd], num_generations=2)
    assert [t.stop_reason for t in rows] == [StopReason.ANSWERED] * 2 + [
        StopReason.ENVIRONMENT_ERROR
    ] * 2
    assert [t.num_turns for t in rows] == [1, 1, 0, 0]
    assert rows[2].error.startswith(("Rollouts are text only", "A message must be a dict"))
    assert collate(rows, 0).completion_mask.sum(1).tolist()[2:] == [0, 0]


def test_prompts_none_of_which_can_be_written_are_refused(chat, scripted):
    with pytest.raises(ChatTemplateError, match="Rollouts are text only"):
        rollout_batch(scripted([]), chat, ODD[:2])


def test_results_that_cannot_be_written_fail_their_trajectory_only(scripted):
    refusing = CHATML.replace(
        "{%- for message in messages %}",
        "{%- for message in messages %}{% if message.role == 'tool' and 'odd' in message.content %}"
        "{{ raise_exception('an odd result') }}{% endif %}",
    )
    assert refusing != CHATML
    chat = ChatFormat.from_tokenizer(chatml_tokenizer(refusing))

    def say(text: str) -> str:
        """
        Say it.

        Args:
            text: what
        """
        return text

    turns = by_prompt(chat, one=[call("say", text="odd")], two=[call("say", text="fine"), "ok"])
    failed, fine = rollout_batch(scripted(turns), chat, [user("one"), user("two")], [[say], [say]])
    assert (failed.stop_reason, failed.num_turns) == (StopReason.ENVIRONMENT_ERROR, 1)
    assert "an odd result" in failed.error
    assert [result.content for result in failed.tool_results] == ["odd"]
    assert (fine.stop_reason, fine.num_turns) == (StopReason.ANSWERED, 2)


def test_a_user_is_asked_after_a_call_that_no_json_holds(chat, scripted):
    turns = ['<tool_call>{"name": "nope", "arguments": {"x": NaN}}</tool_call>', "sorry", "bye"]
    said = ["and now?"]
    (t,) = rollout_batch(
        scripted(turns),
        chat,
        [user()],
        [TOOLS],
        users_batch=[lambda messages: said.pop() if said else None],
    )
    assert (t.stop_reason, t.num_turns) == (StopReason.ANSWERED, 3)
