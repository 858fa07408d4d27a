"""The soak in small: what `make soak` runs, and that each of its checks can fail."""

from dataclasses import replace
from random import Random

import pytest
from fakes import observed, sampled, trajectory

from agent_vllm.types import StopReason, ToolResult
from stress import soak
from stress.trouble import KINDS


@pytest.fixture
def quick(monkeypatch):
    """Calls have a second; nothing sleeps in C code for longer than two."""
    monkeypatch.setattr(soak, "NUM_WARM_UPS", 1)
    monkeypatch.setattr(soak, "LIMITS", replace(soak.LIMITS, tool_timeout_s=1.0))
    for module in ("stress.soak", "stress.trouble"):
        monkeypatch.setattr(f"{module}.SLEEP_S", 2.0)


@pytest.mark.e2e
def test_nothing_is_lost_and_nothing_left(agent_path, quick, capsys):
    with soak.faulty_engine(soak.scripted_engine(), seed=0) as engine:
        outcome = soak.soak(engine, soak.scripted_cases, num_trajectories=60, batch_size=60, seed=0)
        assert len(outcome.kinds) > 8 and engine.met.total() > 0
    soak.print_outcome(outcome, engine)
    outcome.after = replace(outcome.after, memory_mb=outcome.before.memory_mb)  # too few to tell
    assert soak.failures(outcome, 60) == []
    assert "60 trajectories" in capsys.readouterr().out


def test_kinds_are_drawn_by_seed_and_all_of_them_come():
    def kinds(seed):
        return [case.kind for case in soak.scripted_cases(range(20_000), seed)]

    first = kinds(0)
    assert first == kinds(0) != kinds(1)
    assert set(first) == {*KINDS, None} and len(KINDS) >= 20


# ---- what the checks find ----

CASE = soak.Case(
    number=7,
    kind=None,
    question="Do task #7#.",
    tools=[],
    has_user=False,
    reasons=frozenset({StopReason.ANSWERED}),
)


def ended(result="did 7 #7#", status="ok", question=CASE.question, **fields):
    results = [ToolResult(name="work", content=result, status=status)]
    messages = [{"role": "user", "content": question}, *(r.message for r in results)]
    fields = {"messages": messages, "tool_results": results, **fields}
    return trajectory([1, 2], sampled(3, 9), observed(4), sampled(5, 9), **fields)


@pytest.mark.parametrize(
    ("t", "problems"),
    [
        (ended(), []),
        (ended(question="Do task #8#."), ["has another prompt", "bears the marks [7, 8]"]),
        (ended("did 8 #8#"), ["bears the marks [7, 8]"]),
        (ended('{"error": "no"}', "failed"), ["has a failed call, but no fault"]),
        (ended('{"error": "ValueError: no"}', "failed"), []),
        (ended('{"error": "Timed out after 1 s."}', "failed"), []),
        (
            ended(stop_reason=StopReason.USER_ERROR),
            ["has a user's error, but no user", "ended as user_error"],
        ),
    ],
)
def test_a_trajectory_that_went_wrong_is_found(t, problems):
    assert soak.problems(CASE, t, lambda _: CASE.question) == problems


def test_what_grew_is_named():
    before = soak.Held(threads=2, processes=0, files=6, memory_mb=500)
    assert before.grown_since(before) == []
    assert replace(before, threads=3, memory_mb=520).grown_since(before) == ["threads"]
    after = soak.Held(threads=1, processes=1, files=7, memory_mb=600)
    outcome = soak.Outcome(num_trajectories=9, before=before, after=after, slowest_batch_s=999)
    assert soak.failures(outcome, 10) == [
        "9 of 10 trajectories were run",
        "a batch took 999 s",
        "processes grew",
        "files grew",
        "memory_mb grew",
    ]


def test_the_script_answers_by_the_prompt_alone(agent_path):
    engine = soak.scripted_engine()
    chat = soak.ChatFormat.from_tokenizer(engine.tokenizer)
    cases = [replace(c, has_user=True) for c in soak.scripted_cases(range(40), 3)]
    Random(0).shuffle(cases)
    plain = [c for c in cases if c.kind is None][:4]
    for case, t in zip(plain, soak.roll(engine, chat, plain, 0), strict=True):
        own = f"It is #{case.number}#."
        assert [r.content for r in t.tool_results] == [f"did {case.number} #{case.number}#"] * 2
        assert [text for text in t.turn_outputs if "call" not in text] == [own, own]
