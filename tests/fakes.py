"""Small stand-ins and checkers: a ChatML tokenizer over characters, calls written out, tools, the
invariants of a trajectory and of a parsed turn."""

import dataclasses
import importlib.util
import itertools
import json
import math
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_vllm.types import (
    CallRecord,
    ParsedTurn,
    Segment,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
TAGS = ["<tool_call>", "</tool_call>"]
PAD, END = 0, 2  # ids of <|endoftext|> and <|im_end|>

CHATML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""


def chatml_tokenizer(template=CHATML):
    """One id a character, special tokens first; `<|im_end|>` ends a turn."""
    words = [*SPECIAL, *TAGS, *string.printable, "é", "汉"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return _chat_tokenizer(core, template)


def byte_tokenizer(template=CHATML):
    """One id a byte: a character can be cut in its middle."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *TAGS, *alphabet]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return _chat_tokenizer(core, template)


def _chat_tokenizer(core, template):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens(TAGS)
    tokenizer.chat_template = template
    return tokenizer


def trl_template(name):
    """A chat template as TRL ships it."""
    package = Path(importlib.util.find_spec("trl").origin).parent
    return (package / "chat_templates" / f"{name}.jinja").read_text()


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def call(name, **arguments):
    """A tool call as a model would write it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def user(text="hi"):
    return [{"role": "user", "content": text}]


ADD = call("add", a=1, b=2)
NUM_ADD = 51  # tokens of that call with its end: a tag is one token


def by_prompt(chat, **turns):
    """A script that tells conversations apart by their first user message; turns in order."""
    remaining = {text: list(texts) for text, texts in turns.items()}

    def script(request):
        prompt = chat.tokenizer.decode(request.prompt_ids)
        key = next(text for text in remaining if f"user\n{text}<" in prompt)
        turn = remaining[key].pop(0)
        return turn if isinstance(turn, Exception) else [*ids_of(chat.tokenizer, turn), END]

    return script


def tail(chat, trajectory):
    """Return what follows the prompt, as text."""
    return chat.tokenizer.decode(trajectory.completion_ids)


# ---- tools ----


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: first
        b: second
    """
    return a + b


def shout(text: str) -> str:
    """
    Say it louder.

    Args:
        text: what to say
    """
    return text.upper()


# ---- trajectories ----


def sampled(*token_ids, version=0):
    """A sampled segment with logprobs -0.5."""
    return Segment(
        token_ids=list(token_ids), logprobs=[-0.5] * len(token_ids), policy_version=version
    )


def observed(*token_ids):
    return Segment(token_ids=list(token_ids))


def trajectory(
    prompt_ids,
    *segments,
    stop_reason=StopReason.ANSWERED,
    turn_outputs=(),
    tool_results=(),
    spans=(),
    **fields,
):
    """A trajectory from flat lists; a call belongs to the turn whose span its own follows."""
    flat = Trajectory.from_segments(
        prompt_ids=prompt_ids, segments=segments, stop_reason=stop_reason, **fields
    )
    starts = [index for index, span in enumerate(spans) if span.kind == "model"]
    num_turns = max(len(flat.turns), len(turn_outputs), len(starts), bool(tool_results))
    empty = Turn(segment=sampled(), text="")
    turns = [*flat.turns, *[empty] * (num_turns - len(flat.turns))]
    results = list(tool_results)
    for index, (start, end) in enumerate(itertools.pairwise([*starts, len(spans)])):
        own = [span for span in spans[start + 1 : end] if span.kind == "tool"]
        calls = [call_record(results.pop(0) if results else ran(span), span) for span in own]
        users = [s for s in spans[start + 1 : end] if s.kind == "user"]
        turns[index] = dataclasses.replace(
            turns[index], span=spans[start], calls=calls, user_span=users[0] if users else None
        )
    if results:
        turns[0] = dataclasses.replace(turns[0], calls=[call_record(r) for r in results])
    for index, text in enumerate(turn_outputs):
        turns[index] = dataclasses.replace(turns[index], text=text)
    return dataclasses.replace(flat, turns=turns)


def ran(span):
    return ToolResult(name=span.name, content="", status="ok")


def call_record(result, span=None):
    return CallRecord(call=ToolCall(name=result.name, arguments={}), result=result, span=span)


def difference(got, expected):
    """Return where two id lists differ, with ten tokens to each side; None if they don't."""
    if got == expected:
        return None
    pairs = enumerate(zip(got, expected, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
    around = slice(max(index - 10, 0), index + 11)
    return f"index {index}: got {got[around]}, expected {expected[around]}"


def broken_invariants(trajectory, requests):
    """Return what is wrong with one trajectory, given the requests that its engine got."""
    problems = []
    ids, mask, logprobs = (
        trajectory.completion_ids,
        trajectory.completion_mask,
        trajectory.logprobs,
    )
    if not len(ids) == len(mask) == len(logprobs):
        problems.append(f"lengths {len(ids)}, {len(mask)}, {len(logprobs)}")
    if sum(mask) != trajectory.num_sampled_tokens:
        problems.append(f"mask sum {sum(mask)}, sampled {trajectory.num_sampled_tokens}")
    if not all(math.isfinite(logprob) for logprob in logprobs):
        problems.append("a logprob is not finite")
    if any(logprob for logprob, bit in zip(logprobs, mask, strict=False) if not bit):
        problems.append("an observed token has a logprob")
    so_far, prompts = list(trajectory.prompt_ids), []
    for segment in trajectory.segments:
        if segment.is_sampled:
            prompts.append(list(so_far))
        so_far += segment.token_ids
    if len(prompts) != len(requests):
        problems.append(f"{len(prompts)} sampled segments, {len(requests)} requests")
    for turn, (prompt, request) in enumerate(zip(prompts, requests, strict=False)):
        if (where := difference(request.prompt_ids, prompt)) is not None:
            problems.append(f"turn {turn} was asked with other ids, {where}")
    return problems


def broken_properties(parsed):
    """Return what is wrong with a parsed turn, whatever it was parsed from."""
    problems = []
    if not isinstance(parsed, ParsedTurn):
        return [f"not a ParsedTurn: {parsed!r}"]
    message = parsed.message
    if message.get("role") != "assistant" or not isinstance(message.get("content"), str):
        problems.append(f"role or content: {message!r}")
    json.dumps(message)
    for call in parsed.calls:
        if not isinstance(call.name, str) or not call.name:
            problems.append(f"name: {call!r}")
        if call.error is not None and call.arguments is not None:
            problems.append(f"malformed, with arguments: {call!r}")
        if call.error is None and not isinstance(call.arguments, dict | None):
            problems.append(f"arguments: {call!r}")
    readable = [call.as_message() for call in parsed.calls if call.error is None]
    if message.get("tool_calls", []) != readable:
        problems.append(f"calls {readable!r}, message {message!r}")
    return problems
