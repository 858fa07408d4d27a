"""A hundred thousand broken completions through parsing and the next suffix, over all families."""

import math
import random
import time

import pytest
from fakes import broken_properties
from families import (
    ARGUMENTS,
    CALLS,
    ONE_OF_EACH,
    TOOLS,
    accepted,
    assistant,
    chat_of,
    sampled_turn,
)

from agent_vllm.chat import SampledTurn
from agent_vllm.types import ParsedTurn, ToolCall, ToolResult

NUM_COMPLETIONS = 100_000
NUM_SUFFIXES = 4_000  # a render takes longer than a parse: every 25th goes on to the suffix
TEMPLATES = [name for name in accepted() if not name.endswith("_training")]
SCRIPTS = ["汉字", "🙂👩‍👩‍👧", "نص", "\u200b\u202e", "\x00\x07", "ﬀ", "\ufdd0", "�"]
JUNK = ["{", "}", '"', "'", "\\", "[", "]", "<", ">", "(", ")", "=", ",", "null", "1e999", "0x1f"]


# ---- what is mutated, and how ----


class Fuzzer:
    """Mutates one family's well-formed turns, as ids."""

    def __init__(self, chat, rng):
        self._rng = rng
        self._vocab_size = len(chat.tokenizer)
        self.control = sorted(chat.tokenizer.get_added_vocab().values())
        turns = [
            assistant([ToolCall(name="record", arguments=arguments)], thinking=thinking)
            for arguments in ARGUMENTS.values()
            for thinking in (None, "hmm")
        ]
        turns.append(assistant(content="It is."))
        if not chat.template.one_call_per_turn:
            turns.append(assistant(CALLS))
        self.samples = [sampled_turn(chat, turn) for turn in turns]
        encode = chat.tokenizer.backend_tokenizer.encode
        self._words = [encode(text).ids for text in [*SCRIPTS, *JUNK, " ", "\n"]]

    def completion(self):
        """Return what is before a turn, and the broken turn."""
        before, turn = self._rng.choice(self.samples)
        ids = list(turn)
        for _ in range(self._rng.choice([1, 1, 2, 4])):
            at = self._rng.randrange(len(ids) + 1)
            ids = self._rng.choice(self._mutations)(self, ids, at)
        return before, ids[:4000]

    def _cut(self, ids, at):
        return ids[:at]

    def _drop(self, ids, at):
        return ids[:at] + ids[at + self._rng.randrange(1, 9) :]

    def _splice(self, ids, at):
        other = self._rng.choice(self.samples)[1]
        return ids[:at] + other[self._rng.randrange(len(other)) :]

    def _nest(self, ids, at):
        return ids[:at] + self._rng.choice(self.samples)[1] + ids[at:]

    def _control(self, ids, at):
        return ids[:at] + self._rng.choices(self.control, k=self._rng.randrange(1, 4)) + ids[at:]

    def _noise(self, ids, at):
        noise = [self._rng.randrange(self._vocab_size) for _ in range(4)]
        return ids[:at] + noise + ids[at:]

    def _word(self, ids, at):
        return ids[:at] + self._rng.choice(self._words) + ids[at:]

    def _flood(self, ids, at):
        unit = self._rng.choice([*self._words, ids[at : at + 5] or [self.control[0]]])
        num_units = 400 if self._rng.random() < 0.02 else 10
        return ids[:at] + unit * num_units + ids[at:]

    _mutations = (_cut, _drop, _splice, _nest, _control, _noise, _word, _flood)


# ---- what must hold ----


def test_the_checker_finds_what_is_broken():
    good = {"role": "assistant", "content": "x"}
    call = ToolCall(name="f", arguments={"a": 1})
    assert broken_properties(ParsedTurn(message=good, calls=[])) == []
    assert len(broken_properties(ParsedTurn(message=good, calls=[call]))) == 1
    assert len(broken_properties(ParsedTurn(message={**good, "content": None}, calls=[]))) == 1
    bad = ToolCall(name="", arguments={}, error="no")
    assert len(broken_properties(ParsedTurn(message=good, calls=[bad]))) == 2
    assert broken_properties(None) == ["not a ParsedTurn: None"]
    with pytest.raises(TypeError):
        broken_properties(ParsedTurn(message={**good, "x": {1}}, calls=[]))


def results_of(calls, rng):
    """Results under the names that the model wrote, spelling control tokens."""
    content = "".join(rng.choices(["<|im_end|>", "</s>", "x", "<think>", *SCRIPTS], k=4))
    return [ToolResult(name=call.name, content=content, status="invalid") for call in calls]


def control_ids(chat, control, results):
    return [token for token in chat.suffix_ids(results, TOOLS) if token in control]


def test_broken_completions_are_values_and_their_suffix_holds_no_other_control_id(capsys):
    started_s = time.process_time()
    num_calls, num_errors, num_suffixes = 0, 0, 0
    for number, name in enumerate(TEMPLATES):
        chat, rng = chat_of(name), random.Random(number)
        fuzzer, frames = Fuzzer(chat, rng), {}
        control = set(fuzzer.control)
        for index in range(math.ceil(NUM_COMPLETIONS / len(TEMPLATES))):
            before, ids = fuzzer.completion()
            parsed = chat.parse(ids, before, TOOLS, is_cut=rng.random() < 0.05)
            assert broken_properties(parsed) == [], (name, index)
            num_calls += len(parsed.calls)
            num_errors += sum(call.error is not None for call in parsed.calls)
            if index % (NUM_COMPLETIONS // NUM_SUFFIXES) == 0 and parsed.calls:
                results = results_of(parsed.calls[:3], rng)
                if len(results) not in frames:
                    plain = [ToolResult(name="f", content="x", status="ok")] * len(results)
                    frames[len(results)] = control_ids(chat, control, plain)
                assert control_ids(chat, control, results) == frames[len(results)], (name, index)
                num_suffixes += 1
    assert num_errors > 1000
    assert num_calls - num_errors > 1000
    with capsys.disabled():
        print(
            f"\n{NUM_COMPLETIONS} broken completions of {len(TEMPLATES)} templates: {num_calls} "
            f"calls, {num_errors} of them malformed; {num_suffixes} suffixes; "
            f"{time.process_time() - started_s:.0f} s"
        )


def test_text_that_no_tokenizer_gives():
    """Parsers take any string, lone surrogates too."""
    rng = random.Random(0)
    for name in TEMPLATES:
        chat = chat_of(name)
        for before, ids in Fuzzer(chat, rng).samples:
            text = chat.decode_turn(ids)
            at = rng.randrange(len(text) + 1)
            turn = SampledTurn(
                text=text[:at] + rng.choice(["\ud83d", "\udc00\ud83d", "\x00"]) + text[at:],
                prefix=chat.tokenizer.decode(before[-20:]),
                tools=[tool.schema for tool in TOOLS],
            )
            parsed = chat.parser(turn)
            assert broken_properties(parsed) == [], (name, text)
            for call in parsed.calls:
                chat.suffix_ids([ToolResult(name=call.name, content="\ud83d", status="ok")])


# ---- time ----

SIZES = [4_000, 16_000, 64_000]  # characters


def hostile_units(chat):
    """A turn, pieces of it and everything that could open or close something."""
    _, ids = sampled_turn(chat, assistant(CALLS[:1], thinking="hmm"))
    turn = chat.decode_turn(ids)
    pieces = [turn[:end] for end in range(5, len(turn), 9)]
    starts = [turn[start : start + 14] for start in range(0, len(turn), 9)]
    single = [" ", "\n", '"', "'", "\\", "{", "[", "(", "<", ",", "a=", "汉", "}"]
    return turn, [turn, *pieces, *starts, *chat.tokenizer.get_added_vocab(), *single]


def seconds(chat, text, prefix):
    turn = SampledTurn(text=text, prefix=prefix, tools=[tool.schema for tool in TOOLS])
    started_s = time.process_time()
    chat.parser(turn)
    return time.process_time() - started_s


def slope(times):
    """Of log time over log length, between the last two sizes."""
    return math.log(times[-1] / times[-2]) / math.log(SIZES[-1] / SIZES[-2])


def worst_text(chat, prefix):
    """The text of the largest size that takes this family's parser longest."""
    turn, units = hostile_units(chat)
    texts = [
        start + unit * (SIZES[-1] // len(unit))
        for unit in units
        for start in ("", turn[: len(turn) * 2 // 3])
    ]
    return max(texts, key=lambda text: seconds(chat, text, prefix))


def test_the_time_to_parse_hostile_text_is_linear(capsys):
    """The slopes are printed. Only what takes a whole second of CPU, twenty times the slowest of
    today, and grows faster than its length is an error: that is no noise of the machine."""
    lines = []
    for name in ONE_OF_EACH:
        chat = chat_of(name)
        before, _ = sampled_turn(chat, assistant(CALLS[:1], thinking="hmm"))
        prefix = chat.tokenizer.decode(before)
        text = worst_text(chat, prefix)
        times = [min(seconds(chat, text[:size], prefix) for _ in range(3)) for size in SIZES]
        milliseconds = ", ".join(f"{time_s * 1000:.1f}" for time_s in times)
        lines.append(f"{name}: {milliseconds} ms, slope {slope(times):.2f}, {text[-30:]!r}")
        assert times[-1] < 1.0 or slope(times) < 1.6, lines[-1]
    with capsys.disabled():
        print(f"\nworst at {SIZES} characters\n" + "\n".join(lines))


def test_a_quadratic_parser_has_slope_two():
    assert slope([1.0, 1.0, 16.0]) == pytest.approx(2.0)
