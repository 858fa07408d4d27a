"""Check a tokenizer, its chat template and the parser of its turns; needs no weights.

A scripted engine samples the turns that the template itself writes, as a model would that has
learned its format perfectly. Tools are never run; stand-ins return a fixed result.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from agent_vllm.chat import ChatFormat, ChatTemplate, SampledTurn, example_call, num_common
from agent_vllm.engines.models import end_token_ids, merge_end_token_ids, pad_token_id
from agent_vllm.errors import ChatTemplateError, ToolDefinitionError
from agent_vllm.inspect.doctor.findings import Check, Finding, show_ids
from agent_vllm.inspect.doctor.subject import (
    STAND_IN_RESULT,
    USER,
    SubjectState,
    load_tools,
)
from agent_vllm.training import collate
from agent_vllm.types import Messages, ToolCall, ToolResult

_THOUGHT = "Rain is likely there."
_OTHER_PARSER = (
    "If the parser is not of this family, give another (`--parser`, or `parser` of "
    "`ChatFormat.from_tokenizer`)."
)


def find_tokenizer(state: SubjectState) -> Finding:
    """Load the tokenizer."""
    if state.given_tokenizer is not None:
        state.tokenizer = state.given_tokenizer
    elif isinstance(state.source, str | Path):
        state.tokenizer = AutoTokenizer.from_pretrained(state.source)
    else:
        raise ValueError("`tokenizer` must be given with a model object, got None.")
    kind = type(state.tokenizer).__name__
    return Finding(status="pass", evidence=f"{kind} with {len(state.tokenizer)} tokens.")


def find_tools(state: SubjectState) -> Finding:
    """Load the tools and replace their functions by stand-ins."""
    tools = load_tools(state.tool_source)
    state.tools = [
        replace(tool, function=lambda **_: STAND_IN_RESULT, ends_episode=False) for tool in tools
    ]
    names = ", ".join(tool.name for tool in tools)
    return Finding(status="pass", evidence=f"{names}. They are not run here.")


def find_template(state: SubjectState) -> Finding:
    """Check that the template can be extended turn by turn and its calls are read."""
    try:
        state.chat = ChatFormat.from_tokenizer(
            state.tokenizer,
            eos_token_ids=_configured_ends(state.source, state.tokenizer),
            parser=state.parser,
        )
    except ChatTemplateError as error:
        return Finding(status="fail", evidence=f"{error}{_where_it_parts(state)}")
    own = cast(Any, state.tokenizer.chat_template)
    own_texts = list(own.values()) if isinstance(own, dict) else [own]
    suffix = state.chat.suffix_ids(
        [ToolResult(name=state.tools[0].name, content=STAND_IN_RESULT, status="ok")],
        state.tools,
        last_token_id=state.chat.turn_end_id,
    )
    evidence = f"After a tool turn come {len(suffix)} ids: {state.decode(suffix)!r}."
    if state.chat.chat_template in own_texts:
        return Finding(status="pass", evidence=f"The model's own. {evidence}")
    return Finding(
        status="note",
        evidence="The model's own rewrites earlier turns; TRL's training variant is used in its "
        f"place. {evidence}",
        remedy="Give the variant to whoever serves the trained model "
        "(trl.chat_template_utils.get_training_chat_template).",
    )


def _where_it_parts(state: SubjectState) -> str:
    """Return where the model's own template rewrites a turn once its result follows, or nothing."""
    call = {**state.call.as_message(), "id": "call00000"}
    result = {"role": "tool", "name": state.call.name, "content": STAND_IN_RESULT}
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    text = state.tokenizer.chat_template
    if not isinstance(text, str):  # none, or several
        return ""
    template = ChatTemplate(tokenizer=state.tokenizer, text=text, kwargs={})
    try:
        alone, followed = (
            template.render(turns[:num], add_generation_prompt=False) for num in (2, 3)
        )
    except ChatTemplateError:  # the refusal that is being explained says more
        return ""
    if followed.startswith(alone):
        return ""
    spot = num_common(alone, followed)
    around = slice(max(spot - 20, 0), spot + 30)
    return f" {alone[around]!r} becomes {followed[around]!r}."


def _configured_ends(
    source: PreTrainedModel | str | Path, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    if isinstance(source, PreTrainedModel):
        return end_token_ids(source, tokenizer)
    try:
        return merge_end_token_ids(cast(Any, GenerationConfig.from_pretrained(source)).eos_token_id)
    except OSError:  # a folder without one
        return []


def find_tools_in_prompt(state: SubjectState) -> Finding:
    """Check that the prompt names every tool."""
    ids = [state.chat.prompt_ids(prompt, state.tools) for prompt in state.prompts]
    texts = [state.decode(prompt) for prompt in ids]
    missing = [tool.name for tool in state.tools if any(tool.name not in text for text in texts)]
    if missing:
        return Finding(
            status="fail",
            evidence=f"The prompt doesn't name {', '.join(missing)}: {texts[0][:200]!r}",
            remedy="Use a chat template that writes `tools`, or describe them in the system turn.",
        )
    lengths = f"{min(map(len, ids))} to {max(map(len, ids))}"
    return Finding(
        status="pass",
        evidence=f"Every tool is named; prompts of {lengths} tokens, the first ends "
        f"in {texts[0][-60:]!r}.",
    )


def find_calls(state: SubjectState) -> Finding:
    """Check that calls are read as the template writes them: one of each tool, two in a turn."""
    try:
        state.chat.check_tools(state.tools)
    except ToolDefinitionError as error:
        return Finding(status="fail", evidence=str(error), remedy=_OTHER_PARSER)
    if not state.chat.template.one_call_per_turn:
        calls = [example_call(tool) for tool in (*state.tools, state.tools[0])][:2]
        ids = state.written(calls)
        prompt = state.chat.prompt_ids(state.prompts[0], state.tools)
        read = [replace(call, id=None) for call in state.chat.parse(ids, prompt, state.tools).calls]
        if read != calls:
            return Finding(
                status="fail",
                evidence=f"{state.decode(ids)!r} is read as {_as_text(read)} instead of "
                f"{_as_text(calls)}.",
                remedy=_OTHER_PARSER,
            )
    habit = (
        "one call per turn" if state.chat.template.one_call_per_turn else "two in one turn as well"
    )
    text = state.decode(state.written([state.call]))
    return Finding(status="pass", evidence=f"{text!r} is read as it was meant; {habit}.")


def _as_text(calls: Sequence[ToolCall]) -> str:
    shown = [call.error or f"{call.name}({call.arguments})" for call in calls]
    return " and ".join(shown) or "no call"


def find_malformed_call(state: SubjectState) -> Finding:
    """Check that a call that breaks off gives an error result that the model sees."""
    turn = state.written([state.call])
    text = state.chat.decode_turn(turn)
    broken = [*state.encode(text[: len(text) // 2]), turn[-1]]
    trajectory, _ = state.play([broken, state.written([])])
    results = trajectory.tool_results
    shown = f"{state.decode(broken)!r}"
    if not results and not state.chat.marks.call_mark:
        return Finding(
            status="note",
            evidence=f"{shown} is read as an answer: in this template no control token tells that "
            "a call was begun. The trajectory ends there.",
            remedy="Let the reward look for it (`turn_outputs`).",
        )
    if not results or results[0].status == "ok":
        what = "a call that runs" if results else "an answer"
        return Finding(
            status="fail",
            evidence=f"{shown} is read as {what}.",
            remedy="The parser must return a call with `error` for what it can't read.",
        )
    return Finding(status="pass", evidence=f"{shown} is answered with {results[0].content}")


def find_end_token(state: SubjectState) -> Finding:
    """Check that a sampled end token is trained once and the suffix doesn't repeat it."""
    story, chat = state.story, state.chat
    ids, mask = story.completion_ids, story.completion_mask
    if [segment.is_sampled for segment in story.segments] != [True, False, True]:
        return Finding(
            status="fail",
            evidence=f"A call, its result and an answer gave {len(story.segments)} segments.",
            remedy="See `calls parse back`.",
        )
    spots = [len(story.segments[0].token_ids) - 1, len(ids) - 1]
    shown = " and ".join(show_ids(state.tokenizer, ids, spot) for spot in spots)
    num_trained = [
        sum(mask[i] for i in _run_of(ids, spot)) if ids[spot] in chat.end_token_ids else 0
        for spot in spots
    ]
    is_doubled = any(len(_run_of(ids, spot)) > 1 for spot in spots)
    if num_trained != [1, 1] or is_doubled:
        return Finding(
            status="fail",
            evidence=f"The end is trained {num_trained} times at the tool turn and the answer"
            + (", and written twice" if is_doubled else "")
            + f": {shown}",
            remedy="Set `tokenizer.eos_token` to the token that the template ends a turn with.",
        )
    known = ", ".join(f"{id_} {state.decode([id_])!r}" for id_ in chat.end_token_ids)
    evidence = f"Turns end with {known}; trained once at the tool turn and the answer: {shown}"
    eos = state.tokenizer.eos_token_id
    if eos in (ids[spots[0]], ids[spots[1]]):
        return Finding(status="pass", evidence=evidence)
    return Finding(
        status="note",
        evidence=f"{evidence}. The tokenizer's own end ({eos}) is not what this template writes; "
        "both end a turn.",
    )


def _run_of(ids: Sequence[int], spot: int) -> list[int]:
    """Return the indices around the spot that hold the same id, the spot included."""
    first = last = spot
    while first > 0 and ids[first - 1] == ids[spot]:
        first -= 1
    while last + 1 < len(ids) and ids[last + 1] == ids[spot]:
        last += 1
    return list(range(first, last + 1))


def find_padding(state: SubjectState) -> Finding:
    """Check that no real token is masked as padding, whatever the pad id is."""
    pad_id = pad_token_id(state.tokenizer)
    long, short = state.story, replace(state.story, turns=state.story.turns[:1])
    batch = collate([long, short], pad_id)
    lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in (long, short)]
    sampled = [row.num_sampled_tokens for row in (long, short)]
    got = (batch.attention_mask.sum(1).tolist(), batch.completion_mask.sum(1).tolist())
    if got != (lengths, sampled):
        return Finding(
            status="fail",
            evidence=f"Two rows of {lengths} tokens, {sampled} of them sampled, have {got[0]} "
            f"attended and {got[1]} trained.",
            remedy="Tell padding by lengths, never by comparing ids with the pad id.",
        )
    shown = f"{pad_id} {state.decode([pad_id])!r}"
    if state.tokenizer.pad_token_id is None:
        return Finding(
            status="note",
            evidence=f"The tokenizer has no pad token; {shown} fills rows. Fine: padding comes "
            "from lengths here.",
        )
    if pad_id in state.chat.end_token_ids:
        return Finding(
            status="note",
            evidence=f"Pad {shown} is an end token too. Fine here, padding comes from lengths: in "
            f"two rows of {lengths} tokens all {sampled} sampled ones are trained.",
            remedy="For code that compares ids with the pad id, set another `tokenizer.pad_token`.",
        )
    return Finding(status="pass", evidence=f"Pad {shown} is no end token.")


def find_thinking(state: SubjectState) -> Finding:
    """Check that thinking stays in the ids and calls drafted in a thinking block don't run."""
    if "</think>" not in state.chat.chat_template:
        return Finding(status="pass", evidence="The template has no `<think>` block.")
    prompt = state.chat.prompt_ids(state.prompts[0], state.tools)
    is_prefilled = SampledTurn(text="", prefix=state.decode(prompt)).starts_in_thinking
    opening = "" if is_prefilled else "<think>\n"
    thought = f"{opening}{_THOUGHT}\n</think>\n\n"
    *written, end = state.written([state.call])
    call = state.decode(written).rpartition("</think>")[2].lstrip()  # some write an empty block
    draft = state.encode(f"{opening}Perhaps {call}\n</think>\n\nIt is noon.")
    if calls := state.chat.parse(draft, prompt, state.tools).calls:
        return Finding(
            status="fail",
            evidence=f"{state.decode(draft)!r} is read as {_as_text(calls)}.",
            remedy="Use a parser that knows the block (`--parser hermes`), or give "
            "`tokenizer.response_template` a field `reasoning_content`.",
        )
    turn = [*state.encode(thought + call), end]
    trajectory, prompts = state.play([turn, state.written([])])
    if trajectory.num_turns != 2 or prompts[1][: len(prompt) + len(turn)] != [*prompt, *turn]:
        return Finding(
            status="fail",
            evidence=f"{state.decode(turn)!r} is not in the next turn's prompt as it was sampled "
            f"({trajectory.num_turns} turns).",
            remedy="The parser must read a call after a thinking block.",
        )
    notes = [
        "the prompt opens the block" if is_prefilled else "",
        "the template strips earlier thinking" if _strips_thinking(state) else "",
    ]
    kept = "the next turn's ids keep what was sampled, and a drafted call doesn't run"
    if found := " and ".join(filter(None, notes)):
        evidence = f"{found[0].upper()}{found[1:]}. Fine here: {kept}."
        return Finding(status="note", evidence=evidence)
    return Finding(status="pass", evidence=f"{kept[0].upper()}{kept[1:]}.")


def _strips_thinking(state: SubjectState) -> bool:
    """Return whether the template drops a turn's thinking once another turn follows."""
    turns = [
        {"role": "assistant", "content": "It is noon.", "reasoning_content": _THOUGHT},
        {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\nIt is noon."},
    ]
    texts = [_THOUGHT in _rendered(state, [USER, turn, USER]) for turn in turns]
    return not any(texts)


def _rendered(state: SubjectState, messages: Messages) -> str:
    return state.chat.template.render(messages, state.tools, add_generation_prompt=True)


def find_control_text(state: SubjectState) -> Finding:
    """Check that control tokens spelled in a result are encoded as text."""
    added = cast(Any, state.tokenizer).get_added_vocab()
    hostile = " ".join(["x", *added, "x"])
    plain, spelled = (
        [id_ for id_ in _suffix(state, content) if id_ in set(added.values())]
        for content in ("x", hostile)
    )
    if spelled != plain:
        ids = _suffix(state, hostile)
        spot = num_common(ids, _suffix(state, "x"))
        return Finding(
            status="fail",
            evidence=f"A result can forge {len(spelled) - len(plain)} control tokens: "
            f"{show_ids(state.tokenizer, ids, spot)}",
            remedy="Leave `escape_tool_results` of `ChatFormat.from_tokenizer` on.",
        )
    return Finding(
        status="pass",
        evidence=f"A result that spells all {len(added)} added tokens holds none of them.",
    )


def _suffix(state: SubjectState, content: str) -> list[int]:
    result = ToolResult(name=state.tools[0].name, content=content, status="ok")
    return state.chat.suffix_ids([result], state.tools)


TEMPLATE = "template extends"
CALLS = "calls parse back"
TEMPLATE_CHECKS: list[Check[SubjectState]] = [
    Check(
        name="tokenizer",
        find=find_tokenizer,
        remedy="Give a folder with a tokenizer, or an id that can be reached or is in the "
        "Hugging Face cache; with a model object, give its tokenizer.",
    ),
    Check(
        name="tools",
        find=find_tools,
        remedy="`--tools` is a Python file that can be imported; its public functions have type "
        "hints and a Google-style docstring.",
    ),
    Check(
        name=TEMPLATE,
        find=find_template,
        needs=("tokenizer", "tools"),
        remedy="Use a chat template with tool support, and a parser that is known.",
    ),
    Check(name="tools in the prompt", find=find_tools_in_prompt, needs=(TEMPLATE,)),
    Check(name=CALLS, find=find_calls, needs=(TEMPLATE,)),
    Check(name="malformed call", find=find_malformed_call, needs=(CALLS,)),
    Check(name="end token", find=find_end_token, needs=(CALLS,)),
    Check(name="padding", find=find_padding, needs=("end token",)),
    Check(name="thinking kept", find=find_thinking, needs=(CALLS,)),
    Check(name="control text", find=find_control_text, needs=(TEMPLATE,)),
]
