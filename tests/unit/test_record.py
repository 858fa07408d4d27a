"""Recorded rollouts: what is written is read back, whatever it holds and however the run ended."""

import base64
import json
import math
import re
import resource
import signal
import tracemalloc
import urllib.parse
import warnings
from dataclasses import replace

import pytest
from fakes import ADD, add, call, chatml_tokenizer, ids_of, observed, sampled, trajectory, user
from paths import TESTS
from records import record as whole_line
from records import span, turn

from agent_vllm.cli import main
from agent_vllm.errors import RecordError
from agent_vllm.record import (
    RolloutRecorder,
    read_batches,
    read_rollouts,
    redact_secrets,
    to_trajectory,
)
from agent_vllm.record.schema import to_json
from agent_vllm.rollout import rollout_single
from agent_vllm.types import (
    CallRecord,
    Segment,
    Span,
    StopReason,
    ToolCall,
    ToolResult,
    Turn,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "rollouts.jsonl"


def record(path, *trajectories, **options):
    """Write and read back; `options` are fields, or the recorder's own."""
    own = {name: options.pop(name) for name in ("tokenizer", "redact") if name in options}
    with RolloutRecorder(path, **own) as recorder:
        for t in trajectories:
            recorder.write(t, **options)
    return list(read_rollouts(path))


# ---- whole ----


def test_what_is_read_is_what_was_written(path, chat, scripted):
    t = rollout_single(scripted([ADD, "3"]), chat, user("汉"), [add], thinking_ratio=1)
    fields = {
        "mode": "eval", "step": 3, "rank": 1, "rollout": 2, "group": 4, "generation": 5,
        "seed": 2**62, "temperature": 0.7, "max_model_len": 64, "started": 1.5, "tools": ["add"],
        "rewards": {"good": 0.5, "unscored": None}, "advantage": -1.5, "trained": True,
        "learner_logprobs": [-0.25] * len(t.completion_ids), "row": {"answer": ["3", None]},
    }  # fmt: skip
    (line,) = record(path, t, tokenizer=chat.tokenizer, **fields)
    assert {name: line[name] for name in fields} == fields
    assert (line.schema_version, line.id, line.session) == (3, "eval-3-1-0", 1)
    assert line.trajectory == to_trajectory(line) == t
    views = ("completion_ids", "completion_mask", "logprobs", "turn_outputs", "tool_results")
    assert [line[name] for name in views] == [getattr(t, name) for name in views]
    text = "".join(line["token_texts"][str(token)] for token in t.prompt_ids + t.completion_ids)
    assert text == chat.tokenizer.decode(t.prompt_ids + t.completion_ids)
    assert set(map(int, line["token_texts"])) == {*t.prompt_ids, *t.completion_ids}


def test_every_line_is_whole_as_soon_as_it_is_written(path):
    recorder = RolloutRecorder(path)
    for num_lines in (1, 2):
        recorder.write(trajectory([1], sampled(2), observed(3)))
        lines = path.read_text().splitlines(keepends=True)
        assert [line.endswith("}\n") for line in lines] == [True] * num_lines
    recorder.close()


def test_a_later_session_has_ids_of_its_own(path):
    record(path, trajectory([1]), trajectory([2]), step=7)
    record(path, trajectory([3]), step=7)
    lines = record(path, trajectory([4], stop_reason=StopReason.CONTEXT_FULL), step=8)
    assert [(line["id"], line["prompt_ids"]) for line in lines] == [
        ("rollout-7-0-0", [1]), ("rollout-7-0-1", [2]),
        ("rollout-7-0-0-2", [3]), ("rollout-8-0-0-3", [4]),
    ]  # fmt: skip
    assert [len(batch) for batch in read_batches(path)] == [2, 1, 1]


def test_amendments_are_joined(path):
    with RolloutRecorder(path) as recorder:
        first = recorder.write(trajectory([1], sampled(2, 3)))
        recorder.write(trajectory([1], sampled(4)))
        recorder.amend(first, learner_logprobs=[-1.0, -2.0])
        recorder.amend(first, advantage=2.0)
    lines = list(read_rollouts(path))
    assert [line["learner_logprobs"] for line in lines] == [[-1.0, -2.0], None]
    assert [line["advantage"] for line in lines] == [2.0, None]
    assert lines[0]["id"] == first == "rollout-0-0-0"


def test_unknown_fields_are_refused(path):
    with RolloutRecorder(path) as recorder, pytest.raises(TypeError, match=r"no fields \['rewrd'"):
        recorder.write(trajectory([1]), rewrd=1)


def test_reading_holds_one_record_at_a_time(path):
    long = trajectory([1] * 20_000, messages=user("x" * 50_000))
    with RolloutRecorder(path) as recorder:
        for _ in range(150):
            recorder.amend(recorder.write(long), advantage=1.0)
    tracemalloc.start()
    num_read = sum(line["advantage"] == 1.0 for line in read_rollouts(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_read == 150
    assert peak < 2**20 < path.stat().st_size / 10


# ---- odd values ----


@pytest.mark.parametrize(
    "text", ["a\nb\u2028c", "\ud83d!", '\x00\x1f\\u0041"', "🏳️‍🌈 é 汉", "", '"amends"']
)
def test_any_text_survives(path, text):
    message = {"role": "user", "content": text}
    lines = record(path, trajectory([1], messages=[message]), trajectory([2]))
    assert [line["messages"] for line in lines] == [[message], []]


def test_numbers_that_json_lacks_survive_in_fields_of_numbers(path):
    odd = [math.nan, math.inf, -math.inf]
    t = trajectory([1], sampled(2, 3, 4))
    t.segments[0].logprobs[:] = odd
    (line,) = record(path, t, learner_logprobs=odd, advantage=-math.inf, rewards={"r": math.nan})
    for values in (line["logprobs"], line["learner_logprobs"]):
        assert math.isnan(values[0]) and values[1:] == odd[1:]
    assert line["advantage"] == -math.inf and math.isnan(line["rewards"]["r"])

    def refuse(constant):
        raise AssertionError(constant)

    json.loads(path.read_text(), parse_constant=refuse)  # readers other than Python's take it


def test_rows_of_anything_become_json(path):
    import numpy

    row = {"array": numpy.arange(2), 3: {4}, "nan": math.nan, "object": StopReason, "tuple": (1,)}
    (line,) = record(path, trajectory([1]), row=row)
    assert line["row"] == {
        "array": [0, 1], "3": [4], "nan": "NaN", "object": str(StopReason), "tuple": [1],
    }  # fmt: skip


# ---- what a killed run leaves ----


def test_a_line_that_was_cut_off_is_skipped_with_a_warning_and_then_taken_away(path):
    record(path, trajectory([1]), trajectory([2], messages=user("汉")))
    whole = path.read_bytes()
    second = whole.index(b"\n") + 1
    for end in range(second + 1, len(whole) - 1, 7):
        path.write_bytes(whole[:end])
        with pytest.warns(UserWarning, match=r"rollouts.jsonl:2 is cut off"):
            assert [line["prompt_ids"] for line in read_rollouts(path)] == [[1]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [line["prompt_ids"] for line in record(path, trajectory([3]))] == [[1], [3]]
        path.write_bytes(whole[:-1])  # only the newline is gone
        assert len(list(read_rollouts(path))) == 2


def test_a_run_killed_in_its_first_line_can_go_on(path):
    record(path, trajectory([1]))
    path.write_bytes(path.read_bytes()[:40])
    with pytest.warns(UserWarning, match="cut off"), pytest.raises(RecordError, match="holds no"):
        list(read_rollouts(path))
    assert [line["id"] for line in record(path, trajectory([2]))] == ["rollout-0-0-0"]


# ---- files that are no record ----


def lines_of(**changes):
    """A whole record with some fields changed; ... takes one out."""
    value = {**whole_line("t0"), **changes}
    return json.dumps({k: v for k, v in value.items() if v is not ...}) + "\n"


NO_TIME = turn([1], [-0.5], spans=[span("nap", "a", 0, 1)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no recorded trajectory"),
        ('{"schema": 1, "step": 3}\n', ":1 has schema 1, this version reads 2 and 3. Read it with"),
        ("{}\n", ":1 is not a recorded rollout: it has no `schema`"),
        ("[1]\n", ":1 is not a recorded rollout"),
        ("step,reward\n", ":1 is not JSON"),
        (lines_of() + "oops\n", ":2 is not JSON"),
        (lines_of() + lines_of(), ":2 has id 't0', which line 1 has too"),
        (lines_of(advantage=...), ":1 has no `advantage`"),
        (lines_of(step="3"), "`step` must be a valid integer, got '3'"),
        (lines_of(id=[1]), r"`id` must be a valid string, got \[1\]"),
        (lines_of(trained=1), "`trained` must be a valid boolean, got 1"),
        (lines_of(step=True), "`step` must be a valid integer, got True"),
        (lines_of(prompt_ids=[1.0]), "`prompt_ids.0` must be a valid integer, got 1.0"),
        (lines_of(stop_reason="tired"), "`stop_reason` must be 'answered', .*, got 'tired'"),
        (lines_of(rewards=[1]), r"`rewards` must be a valid dictionary, got \[1\]"),
        (lines_of(turns=[{"text": "a"}]), ":1 has no `turns.0.segment`"),
        (
            lines_of(turns=[NO_TIME]),
            "`turns.0.span.kind` must be 'model', 'tool' or 'user', got ",
        ),
        (lines_of(turns=[turn([1], [])]), "`turns.0.segment`: .* one length, got 1 and 0"),
        (lines_of(turns=[turn(["a"], [0.0])]), "`turns.0.segment.token_ids.0` must be a valid int"),
        (lines_of(learner_logprobs=[0.0] * 2), "one number per completion token, got 2 for 5"),
        (lines_of(num_prompt_messages=5), "`num_prompt_messages` must be at most .*, got 5 of 4"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(path, text, message):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RecordError, match=message) as raised:
        list(read_rollouts(path))
    assert str(path) in str(raised.value)


def test_a_whole_record_passes(path):
    path.parent.mkdir()
    path.write_text(lines_of())
    assert len(list(read_rollouts(path))) == 1


def test_a_missing_file(path):
    with pytest.raises(FileNotFoundError, match=r"does not exist\. A trainer with"):
        read_rollouts(path)


@pytest.mark.parametrize("text", ["notes", "notes\n", '{"schema": 1}\n'])
def test_other_files_are_not_written_to(path, text):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RecordError, match=r"exists and is not a record of schema 3\. Move it away"):
        RolloutRecorder(path)
    assert path.read_text() == text


def test_a_folder_means_the_record_in_it(path):
    record(path, trajectory([7]))
    assert [line.prompt_ids for line in read_rollouts(path.parent)] == [[7]]


# ---- turns ----


def test_token_versions_and_call_ids_survive(path):
    segment = Segment(
        token_ids=[2, 3], logprobs=[-1.0, -2.0], policy_version=4, token_versions=[4, 5]
    )
    call = CallRecord(
        call=ToolCall(name="f", arguments={"x": [1, None]}, id="call_7"),
        result=ToolResult(name="f", content="汉", status="ok", call_id="call_7"),
        span=Span(kind="tool", name="f", start_s=0.5, end_s=1.0),
    )
    t = replace(trajectory([1]), turns=[Turn(segment=segment, text="f()", calls=[call])])
    (line,) = record(path, t)
    assert line.trajectory == t
    assert line["token_versions"] == [4, 5]


def test_a_turn_without_tokens_is_read_back(path):
    t = trajectory([1], sampled(), observed(3), sampled(4))
    (line,) = record(path, t)
    assert line.trajectory == t
    assert (line["completion_ids"], line["policy_versions"]) == ([3, 4], [0, 0])


# ---- schema 2 ----

SCHEMA_2 = TESTS / "data" / "schema2.jsonl"


def flat(line):
    """The fields that schema 2 had for a trajectory, as it wrote them."""
    t = line.trajectory
    results = [{"name": r.name, "content": r.content, "status": r.status} for r in t.tool_results]
    return {
        "prompt_ids": t.prompt_ids, "completion_ids": t.completion_ids,
        "completion_mask": t.completion_mask, "logprobs": t.logprobs,
        "policy_versions": t.policy_versions, "turn_outputs": t.turn_outputs,
        "tool_results": results, "messages": t.messages, "stop_reason": t.stop_reason,
    }  # fmt: skip


def test_a_file_of_schema_2_is_read_as_it_was_written():
    written = [json.loads(text) for text in SCHEMA_2.read_text().splitlines()]
    records = [value for value in written if "amends" not in value]
    amended = {value["amends"]: value["learner_logprobs"] for value in written if "amends" in value}
    lines = list(read_rollouts(SCHEMA_2))
    assert len(lines) == len(records) == 3
    for line, value in zip(lines, records, strict=True):
        assert flat(line) == {name: value[name] for name in flat(line)}
        assert line.learner_logprobs == amended.get(line.id)
        assert (line.row, line.seed) == (value["row"], value["seed"])
    two_calls, asked, cut = (line.trajectory for line in lines)
    # a tool that is named "user" is told from the simulated user
    assert [[call.span.name for call in turn.calls] for turn in two_calls.turns] == [
        ["user", "nope", "user", "unknown"], [],
    ]  # fmt: skip
    kinds = [[span.kind for span in turn.spans] for turn in two_calls.turns]
    assert kinds == [["model", *["tool"] * 4], ["model", "user"]]
    assert [[span.kind for span in turn.spans] for turn in asked.turns] == [["model", "user"]] * 2
    assert [len(turn.calls) for turn in cut.turns] == [1, 0]


def test_a_file_of_schema_2_can_be_appended_to(path):
    path.parent.mkdir()
    path.write_bytes(SCHEMA_2.read_bytes())
    lines = record(path, trajectory([7]))
    assert [line.session for line in lines] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_versions": [0]}, "2 sampled turns, 2 turn outputs and 1 policy versions"),
        ({"logprobs": [0.0]}, "is no valid record of schema 2"),
        ({"spans": None}, "is no valid record of schema 2"),
    ],
)
def test_what_is_wrong_in_schema_2_is_named(path, changes, message):
    value = json.loads(SCHEMA_2.read_text().splitlines()[0])
    path.parent.mkdir()
    path.write_text(json.dumps({**value, **changes}) + "\n")
    with pytest.raises(RecordError, match=message) as raised:
        list(read_rollouts(path))
    assert f"{path}:1" in str(raised.value)


# ---- one writer, whole lines ----


def test_a_second_recorder_on_the_file_is_refused(path):
    with RolloutRecorder(path) as recorder:
        recorder.write(trajectory([1]))
        with pytest.raises(RecordError, match="written by another recorder"):
            RolloutRecorder(path)
        recorder.write(trajectory([2]))
    assert [line.prompt_ids for line in record(path, trajectory([3]))] == [[1], [2], [3]]


def test_a_write_that_fails_leaves_whole_lines(path):
    """A limit on the file's size stands for a full disk: the line is written in part."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RolloutRecorder(path) as recorder:
        recorder.write(trajectory([1]))
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                recorder.write(trajectory([2] * 1000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
        assert path.stat().st_size == size
        recorder.write(trajectory([3]))
    assert [line.prompt_ids for line in read_rollouts(path)] == [[1], [3]]


# ---- secrets ----

SECRET = "sk-12ab"


def spelled(line):
    """Return what the record still says, as one text."""
    pieces = line["token_texts"]
    tokens = "".join(pieces[str(t)] for t in line["prompt_ids"] + line["completion_ids"])
    return tokens + line.model_dump_json(exclude={"token_texts"})


def test_secrets_leave_texts_and_tokens(path, chat, scripted):
    def key(owner: str) -> str:
        """
        Looks up a key.

        Args:
            owner: whose
        """
        return f"{owner}: {SECRET}."

    turns = [call("key", owner="bob"), f"It is {SECRET}!"]
    t = rollout_single(scripted(turns), chat, user(f"Not {SECRET}?"), [key])
    options = {"tokenizer": chat.tokenizer, "row": {SECRET: [f"a {SECRET}"]}}
    plain = record(path, t, **options)[0]
    assert spelled(plain).count(SECRET) > 5
    line = record(path, t, redact=redact_secrets(r"sk-\w+"), **options)[1]
    assert SECRET not in spelled(line)
    assert line["tool_results"][0].content == "bob: [redacted]."
    assert line["row"] == {"[redacted]": ["a [redacted]"]}
    expected = [
        -1 if is_secret else token
        for token, is_secret in zip(t.completion_ids, secret_places(chat, t), strict=True)
    ]
    assert line["completion_ids"] == expected
    assert line["logprobs"] == t.logprobs


def secret_places(chat, t):
    text = chat.tokenizer.decode(t.completion_ids)
    ids = t.completion_ids
    needle = ids_of(chat.tokenizer, SECRET)
    starts = [i for i in range(len(ids)) if ids[i : i + len(needle)] == needle]
    assert len(starts) == text.count(SECRET) == 2
    return [any(s <= i < s + len(needle) for s in starts) for i in range(len(ids))]


PEM = "-----BEGIN KEY-----\nsk/12+ab\n-----END KEY-----"
CARD = 4111111111111111


@pytest.mark.parametrize(
    ("pattern", "said", "spelled"),
    [
        ("sk-1", "sk-1", '{"key": "sk-\\u0031"}'),
        ("sk-1", "sk-1", "SK-1"),  # a normaliser changed it
        (PEM[:30], "", json.dumps(json.dumps({"key": PEM}))),  # in the description of a tool
    ],
)
def test_where_the_ids_may_spell_it_otherwise_all_are_blanked(path, pattern, said, spelled):
    tokenizer = chatml_tokenizer()
    ids = ids_of(tokenizer, spelled)
    t = trajectory(ids, sampled(*ids), messages=user(said), num_prompt_messages=1)
    (line,) = record(path, t, tokenizer=tokenizer, redact=redact_secrets(re.escape(pattern)))
    assert set(line["prompt_ids"] + line["completion_ids"]) == {-1}
    assert line["token_texts"] == {"-1": "[redacted]"}


def test_a_match_elsewhere_in_the_tokens_hides_none_that_they_spell_otherwise(path):
    tokenizer = chatml_tokenizer()
    ids = ids_of(tokenizer, "sk-2 sk-2 sk-?")
    t = trajectory(ids, messages=user("sk-1, sk-2"), num_prompt_messages=1)
    (line,) = record(path, t, tokenizer=tokenizer, redact=redact_secrets(r"sk-\d"))
    assert set(line["prompt_ids"]) == {-1}


@pytest.mark.parametrize("has_secret", [False, True])
def test_without_a_tokenizer_no_id_of_a_redacted_record_is_kept(path, has_secret):
    """Nobody can say what they spell."""
    t = trajectory([1], sampled(2), messages=user(SECRET if has_secret else "hi"))
    (line,) = record(path, t, redact=redact_secrets(r"sk-\w+"))
    assert line["prompt_ids"] + line["completion_ids"] == [-1, -1]


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (f"the key {SECRET}, kept", "the key [redacted], kept"),
        (json.dumps({"key": PEM}), "[redacted]"),
        (json.dumps(json.dumps({"key": PEM})), "[redacted]"),
        (repr({"key": PEM}), "[redacted]"),
        (urllib.parse.quote(PEM, safe=""), "[redacted]"),
        (base64.b64encode(PEM.encode()).decode(), "[redacted]"),
        ("Basic " + base64.b64encode(b"me:sk-12ab").decode(), "[redacted]"),
        (CARD, "[redacted]"),
        (float(CARD), "[redacted]"),
        ({"nested": [CARD, {SECRET: 1.5}]}, {"nested": ["[redacted]", {"[redacted]": 1.5}]}),
        (["a word of ordinary length", 3, 0.1, None, True], ...),
    ],
)
def test_a_secret_is_found_in_every_form_in_which_it_is_written(path, value, kept):
    patterns = (re.escape(PEM), r"sk-\w+", r"\b\d{16}\b")
    messages = [{"role": "user", "content": "hi", "extra": value}]
    call = ToolCall(name="f", arguments={"value": value})
    result = ToolResult(name="f", content=to_json(value), status="ok")
    turn = Turn(
        segment=sampled(1), text=to_json(value), calls=[CallRecord(call=call, result=result)]
    )
    t = replace(trajectory([1], messages=messages), turns=[turn], error=to_json(value))
    fields = {"row": {"value": value}, "rewards": {"good": 1 / 3}, "started": float(CARD)}
    (line,) = record(path, t, redact=redact_secrets(*patterns), **fields)
    kept = value if kept is ... else kept
    (call_record,) = line["calls"]
    assert line["messages"][0]["extra"] == kept
    assert line["row"] == {"value": kept}
    assert call_record.call.arguments == {"value": kept}
    for text in (line["error"], line["turn_outputs"][0], call_record.result.content):
        assert ("[redacted]" in text) == (kept != value)
        assert not any(secret in text for secret in (SECRET, str(CARD), to_json(PEM)))
    assert (line["rewards"], line["started"]) == (fields["rewards"], fields["started"])


def test_a_call_that_is_nested_480_deep_is_redacted_too(path):
    arguments = SECRET
    for _ in range(480):
        arguments = {"a": arguments}
    turn = Turn(segment=sampled(1), text="", calls=[])
    call = CallRecord(
        call=ToolCall(name="f", arguments=arguments),
        result=ToolResult(name="f", content="", status="ok"),
    )
    t = replace(trajectory([1]), turns=[replace(turn, calls=[call])])
    with RolloutRecorder(path, redact=redact_secrets(r"sk-\w+")) as recorder:
        recorder.write(t)
    assert SECRET not in path.read_text() and '"a":"[redacted]"' in path.read_text()


def test_a_hook_may_leave_a_trajectory_out(path):
    def only_even(line):
        return line if line["prompt_ids"][0] % 2 == 0 else None

    lines = record(path, *(trajectory([i]) for i in range(4)), redact=only_even)
    assert [line["prompt_ids"] for line in lines] == [[0], [2]]


def test_what_a_hook_breaks_is_named_before_it_is_written(path):
    with (
        RolloutRecorder(path, redact=lambda line: {**line, "messages": None}) as recorder,
        pytest.raises(
            RecordError,
            match="Record rollout-0-0-0, redacted: `messages` must be a valid list",
        ),
    ):
        recorder.write(trajectory([1]))
    assert path.read_text() == ""


# ---- the command line ----


def test_a_command_says_what_is_wrong_with_a_file(path, tmp_path):
    with pytest.raises(SystemExit, match=r"agent-vllm: .*rollouts.jsonl does not exist"):
        main(["export", str(path), str(tmp_path / "out.parquet")])
    path.parent.mkdir()
    path.write_text(lines_of() + "oops\n")
    with pytest.raises(SystemExit, match=r"agent-vllm: .*rollouts.jsonl:2 is not JSON"):
        main(["export", str(path), str(tmp_path / "out.parquet")])
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
