"""Learn from a chat template, once, what the hot path needs to know about its turns.

Renders a few probe turns and looks at their token ids. Invariant: everything here runs while a
`ChatFormat` is built, never during a rollout.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from agent_vllm.chat.codec import TokenCodec, num_common
from agent_vllm.chat.parsing import ResponseParser, SampledTurn, find_parser
from agent_vllm.chat.template import NOT_EXTENDABLE, PROBE_RESULTS, ChatTemplate
from agent_vllm.errors import ChatTemplateError
from agent_vllm.types import ToolCall

PROBE_CALL = ToolCall(name=PROBE_RESULTS[0].name, arguments={"city": "Oslo"})
_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_CALL.name,
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TurnMarks:
    """Hold the control tokens that a template writes around assistant turns.

    Attributes:
        turn_end_id: the token that ends a turn with calls; None where there is none.
        after_turn_end: text that follows this token, such as a newline; None where the token is
            written with the message that follows.
        answer_end_id: the token that ends an answer; None where there is none.
        call_mark: text of a control token that occurs only in turns with calls; empty where there
            is none.
    """

    turn_end_id: int | None = None
    after_turn_end: str | None = ""
    answer_end_id: int | None = None
    call_mark: str = ""

    @property
    def end_ids(self) -> tuple[int, ...]:
        return tuple(id_ for id_ in (self.turn_end_id, self.answer_end_id) if id_ is not None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TemplateProbe:
    """Look at the token ids of the turns that a template writes.

    Attributes:
        end_token_ids: end tokens known beforehand, from the tokenizer and the caller.
    """

    codec: TokenCodec
    template: ChatTemplate
    end_token_ids: tuple[int, ...]

    def answer_marks(self) -> TurnMarks:
        """Return what is known where no tool turn will be written."""
        try:
            return TurnMarks(answer_end_id=self._answer_end())
        except ChatTemplateError:  # the template refuses so short a conversation
            return TurnMarks()

    def turn_marks(self) -> TurnMarks:
        """Find the tokens that end turns, and the mark of turns with calls.

        Raises:
            ChatTemplateError: the template refuses a probe turn.
        """
        marks = dataclasses.replace(self._call_end(), answer_end_id=self._answer_end())
        call_text, answer_text = self._written_turn(PROBE_CALL)[1], self._written_turn(None)[1]
        ends = [self.codec.decode([end]) for end in marks.end_ids]
        found = [
            text
            for text in self.codec.added_tokens
            if text in call_text and text not in answer_text and text not in ends
        ]
        return dataclasses.replace(marks, call_mark=min(found, key=call_text.index, default=""))

    def check_suffix(self, suffix_ids: Callable[..., list[int]]) -> None:
        """Check that turn and suffix are, token by token, the render of the whole conversation.

        Raises:
            ChatTemplateError: they are not.
        """
        for results in (PROBE_RESULTS[:1], PROBE_RESULTS):
            turn = self.template.tool_turn(results)
            added = self.template.after_tool_turn(results, add_generation_prompt=True)
            whole = self.codec.encode(turn + added)
            suffix = suffix_ids(results)
            start = len(whole) - len(suffix)
            if whole[start:] != suffix or whole[:start] != self.codec.encode(turn)[:start]:
                raise ChatTemplateError(
                    NOT_EXTENDABLE.format(reason="encoded together with what follows")
                )

    def parser(self, marks: TurnMarks) -> ResponseParser:
        """Find a parser that reads a call as this template writes it.

        Raises:
            ChatTemplateError: no known parser does.
        """
        prefix, text = self._written_turn(PROBE_CALL)
        end = "" if marks.turn_end_id is None else self.codec.token_text(marks.turn_end_id)
        turn = SampledTurn(
            text=text.rpartition(end)[0] if end and end in text else text,
            prefix=prefix,
            end=end,
            tools=[_PROBE_TOOL],
        )
        drafted = dataclasses.replace(turn, text=f"<think>\n{turn.text}\n</think>\n\nNo.")
        parser = find_parser(
            self.codec.tokenizer,
            self.template.text,
            reads=lambda parse: parse(turn).calls == [PROBE_CALL],
            is_better=lambda parse: not parse(drafted).calls,  # it knows what thinking is
        )
        if parser is None:
            raise ChatTemplateError(
                f"No known parser reads a call as this chat template writes it: {turn.text!r}. "
                "Pass `parser`: a callable, or a name of vLLM's tool parsers."
            )
        return parser

    def _answer_end(self) -> int | None:
        return self._closing_id(self._written_turn(None)[1])

    def _call_end(self) -> TurnMarks:
        """Find the token that ends a turn with calls: in the turn, or first in what follows."""
        encode, decode = self.codec.encode, self.codec.decode
        whole = encode(self.template.tool_turn(PROBE_RESULTS))
        prompt = encode(self.template.written_turn(None)[0])
        turn = decode(whole[num_common(prompt, whole) :])
        end_id = self._closing_id(turn)
        if end_id is not None:
            after = turn.rpartition(decode([end_id]))[2]
            return TurnMarks(turn_end_id=end_id, after_turn_end=after)
        added = self.template.after_tool_turn(PROBE_RESULTS, add_generation_prompt=False)
        first = encode(added)[:1]
        if first and first[0] in self.codec.control_ids:
            return TurnMarks(turn_end_id=first[0], after_turn_end=None)
        return TurnMarks()

    def _written_turn(self, call: ToolCall | None) -> tuple[str, str]:
        """Return the part of a turn that a prompt holds already, and the rest of it."""
        prompt, whole = map(self.codec.encode, self.template.written_turn(call))
        # A prompt may open a thinking block where the finished turn shows an empty one.
        cut = num_common(prompt, whole)
        return self.codec.decode(whole[:cut]), self.codec.decode(whole[cut:])

    def _closing_id(self, turn: str) -> int | None:
        """Return the control token that ends this turn, if it occurs nowhere else in it."""
        ids = self.codec.encode(turn.rstrip())
        last = ids[-1] if ids else None
        is_end = last in self.codec.control_ids and ids.count(last) == 1
        return last if is_end or last in self.end_token_ids else None
