"""Conversations to token ids, and sampled ids back to a message.

Owns the way between text and ids; the template's text comes from `chat_template`, the reading of
turns from `parsing`. Invariant: ids that were sampled are never decoded and encoded again. The next
prompt is all ids so far plus `suffix_ids`, which hold only what the template and the tools wrote.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from agent_vllm.chat_template import (
    NOT_EXTENDABLE,
    PROBE_RESULTS,
    ChatTemplate,
    choose_template,
)
from agent_vllm.errors import ChatTemplateError
from agent_vllm.parsing import (
    ResponseParser,
    SampledTurn,
    find_parser,
    named_parser,
    parse_hermes,
    safely,
)
from agent_vllm.tools import Tool
from agent_vllm.types import Messages, ParsedTurn, ToolCall, ToolResult

_TRUNCATION_MARK = "\n[... {num_cut} tokens cut]"
_HEADER_TOKENS = 64  # enough of a prompt to show the header of the turn that it opens
_SEAM = "\ufdd0"  # a noncharacter: text is encoded apart on its two sides
_PROBE_CALL = ToolCall(name=PROBE_RESULTS[0].name, arguments={"city": "Oslo"})
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE_CALL.name,
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How one tokenizer's chat template turns conversations into ids and back.

    Build it with `ChatFormat.from_tokenizer`, which checks the template.

    Attributes:
        template: the chat template in use, with its arguments.
        end_token_ids: ids that end an assistant turn: the tokenizer's end of sequence, further ones
            that were given, and those that the template itself writes.
        turn_end_id: the one that the template writes after a turn with calls; None where it writes
            none.
        after_turn_end: what the template writes behind it, such as a newline; None where the end is
            written with the message that follows.
        call_mark: a control token that only turns with calls have, as text; empty where there is
            none.
        parser: reads assistant turns.
        escape_tool_results: control tokens' text inside tool results, and in the names that the
            model gave tools, stays text.
    """

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    end_token_ids: tuple[int, ...]
    turn_end_id: int | None = None
    after_turn_end: str | None = ""
    call_mark: str = ""
    parser: ResponseParser = parse_hermes
    escape_tool_results: bool = True

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        parser: ResponseParser | str | None = None,
        needs_tools: bool = True,
        escape_tool_results: bool = True,
    ) -> "ChatFormat":
        """Check the template at token level and settle which one is used, and what reads turns.

        A template that rewrites earlier turns is replaced by TRL's training variant where TRL ships
        one (https://huggingface.co/docs/trl/main/en/chat_templates).

        Args:
            eos_token_ids: further ids that end a turn, as `generation_config.eos_token_id` lists
                them.
            template_kwargs: fixed arguments for every render.
            parser: reads assistant turns: a callable from `SampledTurn` to `ParsedTurn`, or a name
                (see `agent_vllm.parsing.named_parser`). By default the first that reads a call as
                this template writes it.
            needs_tools: False skips the checks that only tool turns need.
            escape_tool_results: False lets control tokens inside tool results be control tokens.

        Raises:
            ChatTemplateError: no template, none that supports tools, one that can't be extended, or
                one whose calls no known parser reads.
            ValueError: no parser has this name.
        """
        template = choose_template(tokenizer, template_kwargs or {}, needs_tools=needs_tools)
        chat = cls(
            tokenizer=tokenizer,
            template=template,
            end_token_ids=_known_ends(tokenizer, eos_token_ids),
            escape_tool_results=escape_tool_results,
        )
        if isinstance(parser, str):
            parser = named_parser(parser, tokenizer)
        if parser is not None:
            chat = dataclasses.replace(chat, parser=safely(parser))
        if needs_tools:
            chat = chat._with_turn_ends()
            chat._check_ids()
            if parser is None:
                chat = chat._with_found_parser()
        return chat

    @property
    def chat_template(self) -> str:
        """The Jinja text in use."""
        return self.template.text

    @property
    def thinking_switch(self) -> str | None:
        """The template's own name for its thinking switch; None where it has none."""
        return self.template.thinking_switch

    def with_thinking(self, thinking: bool) -> "ChatFormat":
        """The same format with the template's thinking switch set, for every render.

        Raises:
            ChatTemplateError: the template has no switch.
        """
        return dataclasses.replace(self, template=self.template.with_switch(thinking))

    # ---- conversations to ids ----

    def prompt_ids(self, messages: Messages, tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of a conversation that waits for the assistant: `[P]`."""
        return self._encode(self.template.render(messages, tools, add_generation_prompt=True))

    def suffix_ids(
        self,
        results: Sequence[ToolResult],
        tools: Sequence[Tool] = (),
        *,
        last_token_id: int | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """What the template writes after an assistant turn that called tools: results and header.

        Args:
            results: in call order.
            tools: the row's tools, as in `prompt_ids`.
            last_token_id: the last id before the suffix. If it isn't the template's end of turn
                (another end token was sampled, or none), the suffix begins with that end.
            add_generation_prompt: False after the last turn.

        Raises:
            ChatTemplateError: the render with the results doesn't extend the one without them.
        """
        results = [
            dataclasses.replace(r, name=self.as_data(r.name), content=self.as_data(r.content))
            for r in results
        ]
        added = self.template.after_tool_turn(
            results, tools, add_generation_prompt=add_generation_prompt
        )
        if self.turn_end_id is None:
            return self._encode_added(self.template.tool_turn(results, tools), added)
        if self.after_turn_end is not None:
            added = self._token_text(self.turn_end_id) + self.after_turn_end + added
        ids = self._encode(added)
        return ids[1:] if last_token_id == self.turn_end_id else ids

    def truncate(self, text: str, max_tokens: int) -> str:
        """The text's beginning in at most `max_tokens` tokens, marked if anything was cut."""
        ids = self._encode(self.as_data(text))
        if len(ids) <= max_tokens:
            return text
        mark = _TRUNCATION_MARK.format(num_cut=len(ids))
        kept = max(max_tokens - len(self._encode(mark)), 0)
        mark = _TRUNCATION_MARK.format(num_cut=len(ids) - kept)
        return self._decode(ids[:kept]).rstrip("�") + mark

    # ---- sampled ids to messages ----

    def parse(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int] = (),
        tools: Sequence[Tool] = (),
        *,
        is_cut: bool = False,
    ) -> ParsedTurn:
        """One sampled turn as a message and its calls. Any ids give a value, never an error.

        Args:
            token_ids: as sampled, with the end token if there was one.
            prompt_ids: what they followed; tells whether the turn starts inside a thinking block.
            tools: the row's tools; some families write values whose type only the schema tells.
            is_cut: the turn ran into a limit. Nothing in it is a call.
        """
        text = self.decode_turn(token_ids)
        turn = SampledTurn(
            text=text,
            prefix=self._decode(prompt_ids[-_HEADER_TOKENS:]),
            end="" if is_cut else self._end_text(token_ids),
            tools=[tool.schema for tool in tools],
        )
        parsed = self.parser(turn)
        if is_cut:
            message = {"role": "assistant", "content": text} if parsed.calls else parsed.message
            return ParsedTurn(message=message, calls=[], text=text)
        sign = self._sign_of_calls(parsed.message["content"], token_ids)
        if sign and not parsed.calls:
            error = f"The turn has {sign} but no call that can be read."
            return ParsedTurn(
                message=parsed.message,
                calls=[ToolCall(name="unknown", arguments=None, error=error)],
                text=text,
            )
        return dataclasses.replace(parsed, text=text)

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """The turn's text without its end token, special tokens kept (tags can be special)."""
        ids = list(token_ids)
        if ids and ids[-1] in self.end_token_ids:
            ids.pop()
        return self._decode(ids)

    def _sign_of_calls(self, content: str, token_ids: Sequence[int]) -> str:
        """What only turns with calls have, if this one has it: a mark, or an end of their own."""
        if self.call_mark and self.call_mark in content:
            return self.call_mark
        last = token_ids[-1] if token_ids else None
        is_call_end = last == self.turn_end_id and last not in self._template_ends[1:]
        return self._decode([last]) if last is not None and is_call_end else ""

    def _end_text(self, token_ids: Sequence[int]) -> str:
        """The end that parsers expect: as sampled if the template has it, else the template's."""
        last = token_ids[-1] if token_ids else None
        known = last if last in self._template_ends else self.turn_end_id
        return "" if known is None else self._token_text(known)

    # ---- learned from the template ----

    @functools.cached_property
    def _template_ends(self) -> tuple[int, ...]:
        """The ids that the template writes after a turn with calls, and after an answer."""
        answer_end = self._closing_id(self._written_turn(None)[1])
        return tuple(id_ for id_ in (self.turn_end_id, answer_end) if id_ is not None)

    def _written_turn(self, call: ToolCall | None) -> tuple[str, str]:
        """How the template writes a turn: what a prompt has of it already, and the rest."""
        prompt, whole = map(self._encode, self.template.written_turn(call))
        # A prompt may open a thinking block where the finished turn shows an empty one.
        cut = num_common(prompt, whole)
        return self._decode(whole[:cut]), self._decode(whole[cut:])

    def _closing_id(self, turn: str) -> int | None:
        """The control token that this turn ends with, if it stands nowhere else in it."""
        ids = self._encode(turn.rstrip())
        last = ids[-1] if ids else None
        is_end = last in self._control_ids and ids.count(last) == 1
        return last if is_end or last in self.end_token_ids else None

    @functools.cached_property
    def _control_ids(self) -> frozenset[int]:
        added = cast(dict[int, Any], self.tokenizer.added_tokens_decoder)
        special = {index for index, token in added.items() if token.special}
        return frozenset(special.union(self.tokenizer.all_special_ids))

    def _with_turn_ends(self) -> "ChatFormat":
        chat = self._with_call_end()
        call_text, answer_text = chat._written_turn(_PROBE_CALL)[1], chat._written_turn(None)[1]
        ends = [chat._decode([end]) for end in chat._template_ends]
        marks = [
            text
            for text in self._added_tokens
            if text in call_text and text not in answer_text and text not in ends
        ]
        return dataclasses.replace(
            chat,
            end_token_ids=tuple(dict.fromkeys((*self.end_token_ids, *chat._template_ends))),
            call_mark=min(marks, key=call_text.index, default=""),
        )

    def _with_call_end(self) -> "ChatFormat":
        """Find what ends a turn with calls: in the turn itself, or first in what follows."""
        whole = self.template.tool_turn(PROBE_RESULTS)
        prompt = self.template.written_turn(None)[0]
        turn = self._decode(self._encode(whole)[num_common(*map(self._encode, (prompt, whole))) :])
        end_id = self._closing_id(turn)
        if end_id is not None:
            after = turn.rpartition(self._decode([end_id]))[2]
            return dataclasses.replace(self, turn_end_id=end_id, after_turn_end=after)
        added = self.template.after_tool_turn(PROBE_RESULTS, add_generation_prompt=False)
        first = self._encode(added)[:1]
        if first and first[0] in self._control_ids:
            return dataclasses.replace(self, turn_end_id=first[0], after_turn_end=None)
        return self

    def _check_ids(self) -> None:
        """Prompt, turn and suffix must be, token by token, what the template gives as a whole."""
        for results in (PROBE_RESULTS[:1], PROBE_RESULTS):
            turn = self.template.tool_turn(results)
            added = self.template.after_tool_turn(results, add_generation_prompt=True)
            whole = self._encode(turn + added)
            suffix = self.suffix_ids(results)
            start = len(whole) - len(suffix)
            if whole[start:] != suffix or whole[:start] != self._encode(turn)[:start]:
                raise ChatTemplateError(
                    NOT_EXTENDABLE.format(reason="encoded together with what follows")
                )

    def _with_found_parser(self) -> "ChatFormat":
        prefix, text = self._written_turn(_PROBE_CALL)
        end = self._end_text([])
        turn = SampledTurn(
            text=text.rpartition(end)[0] if end and end in text else text,
            prefix=prefix,
            end=end,
            tools=[_PROBE_TOOL],
        )
        drafted = dataclasses.replace(turn, text=f"<think>\n{turn.text}\n</think>\n\nNo.")
        parser = find_parser(
            self.tokenizer,
            self.template.text,
            reads=lambda parse: parse(turn).calls == [_PROBE_CALL],
            is_better=lambda parse: not parse(drafted).calls,  # it knows what thinking is
        )
        if parser is None:
            raise ChatTemplateError(
                f"No known parser reads a call as this chat template writes it: {turn.text!r}. "
                "Pass `parser`: a callable, or a name of vLLM's tool parsers."
            )
        return dataclasses.replace(self, parser=parser)

    # ---- text and ids ----

    @functools.cached_property
    def _token_text(self) -> Callable[[int], str]:
        """The text of one end token; decoding takes as long as for a turn."""
        return functools.lru_cache(maxsize=16)(lambda token: self._decode([token]))

    @property
    def _added_tokens(self) -> list[str]:
        return list(cast(Any, self.tokenizer).get_added_vocab())

    @functools.cached_property
    def _control_text(self) -> re.Pattern[str]:
        """Matches before every place where the text of an added token begins."""
        texts = sorted(map(re.escape, self._added_tokens), key=len, reverse=True)
        return re.compile(f"(?={'|'.join(text for text in texts if len(text) > 1)})")

    def as_data(self, text: str) -> str:
        """The text for a render: a seam inside each control token that it spells keeps it text."""
        if not self.escape_tool_results:
            return text
        text = text.replace(_SEAM, "�")
        starts = [match.start() + 1 for match in self._control_text.finditer(text)]
        cuts = [0, *starts, len(text)]
        return _SEAM.join(text[a:b] for a, b in itertools.pairwise(cuts))

    def _encode_added(self, before: str, added: str) -> list[int]:
        """Ids of what was added to a text that no control token ends."""
        ids = self._encode(before)
        whole = self._encode(before + added)
        if whole[: len(ids)] != ids:
            raise ChatTemplateError(NOT_EXTENDABLE.format(reason="a tool turn changes them"))
        return whole[len(ids) :]

    def _encode(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates have no token
        parts = [part for part in text.split(_SEAM) if part]
        encode = functools.partial(self.tokenizer, add_special_tokens=False)
        return [token for part in parts for token in encode(part)["input_ids"]]

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self.tokenizer.is_fast:  # its own `decode` first looks at each id in Python
            backend = cast(Any, self.tokenizer).backend_tokenizer
            return backend.decode(list(token_ids), skip_special_tokens=False)
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return cast(str, text)


def num_common(a: Sequence, b: Sequence) -> int:
    """How many items, such as ids, the two begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))


def _known_ends(tokenizer: PreTrainedTokenizerBase, more: Sequence[int]) -> tuple[int, ...]:
    ids = [tokenizer.eos_token_id, *more]
    found = tuple(dict.fromkeys(token for token in ids if token is not None))
    if not found:
        raise ChatTemplateError(
            "No end-of-turn token is known. Set `tokenizer.eos_token` to the token that ends an "
            "assistant turn."
        )
    return found
