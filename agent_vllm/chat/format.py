"""Turn conversations into token ids, and sampled ids back into messages: the hot path.

Text comes from `template`, calls are read by `parsing`, and `probe` has learned the template's
marks beforehand. Invariant: sampled ids are never decoded and encoded again. The next prompt is all
ids so far plus `suffix_ids`, which hold only what the template and the tools wrote.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from agent_vllm.chat.codec import TokenCodec
from agent_vllm.chat.parsing import (
    ResponseParser,
    SampledTurn,
    named_parser,
    parse_hermes,
    safely,
)
from agent_vllm.chat.probe import TemplateProbe, TurnMarks
from agent_vllm.chat.template import NOT_EXTENDABLE, ChatTemplate, choose_template
from agent_vllm.chat.tool_check import ToolCheck
from agent_vllm.errors import ChatTemplateError, ToolDefinitionError
from agent_vllm.tools import Tool
from agent_vllm.types import Messages, ParsedTurn, ToolCall, ToolResult

_TRUNCATION_MARK = "\n[... {num_cut} tokens cut]"
_HEADER_TOKENS = 64  # enough of a prompt to show the header of the turn that it opens


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """Turn conversations into token ids and back, as one tokenizer's chat template writes them.

    Build it with `ChatFormat.from_tokenizer`, which checks the template.

    Attributes:
        tokenizer: the tokenizer whose template it is.
        template: the chat template in use, with its arguments.
        end_token_ids: ids that end an assistant turn: the tokenizer's end of sequence, those given
            by the caller, and those that the template writes.
        marks: the control tokens that the template writes around turns.
        parser: reads assistant turns.
        escape_tool_results: control tokens spelled in tool results, and in the names that the
            model gave tools, stay text.
    """

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    end_token_ids: tuple[int, ...]
    marks: TurnMarks = dataclasses.field(default_factory=TurnMarks)
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
        """Build the format: choose the template, check it at token level, and find a parser.

        A template that rewrites earlier turns is replaced by TRL's training variant where TRL ships
        one (https://huggingface.co/docs/trl/main/en/chat_templates).

        Args:
            tokenizer: has a chat template.
            eos_token_ids: further ids that end a turn, as `generation_config.eos_token_id` lists
                them.
            template_kwargs: fixed arguments for every render.
            parser: reads assistant turns: a callable from `SampledTurn` to `ParsedTurn`, or a name
                (see `agent_vllm.chat.named_parser`). By default the first that reads a call as this
                template writes it.
            needs_tools: False skips the checks that only tool turns need.
            escape_tool_results: False lets control tokens spelled in tool results become control
                tokens.

        Raises:
            ChatTemplateError: there is no template, it does not support tools, it can't be
                extended, or no known parser reads its calls.
            ValueError: no parser has this name.
        """
        template = choose_template(tokenizer, template_kwargs or {}, needs_tools=needs_tools)
        ends = known_ends(tokenizer, eos_token_ids)
        probe = TemplateProbe(codec=TokenCodec(tokenizer), template=template, end_token_ids=ends)
        if isinstance(parser, str):
            parser = named_parser(parser, tokenizer)
        marks = probe.turn_marks() if needs_tools else probe.answer_marks()
        added_ends = marks.end_ids if needs_tools else ()
        chat = cls(
            tokenizer=tokenizer,
            template=template,
            end_token_ids=tuple(dict.fromkeys((*ends, *added_ends))),
            marks=marks,
            parser=parse_hermes if parser is None else safely(parser),
            escape_tool_results=escape_tool_results,
        )
        if not needs_tools:
            return chat
        probe.check_suffix(chat.suffix_ids)
        return chat if parser is not None else dataclasses.replace(chat, parser=probe.parser(marks))

    @functools.cached_property
    def codec(self) -> TokenCodec:
        """Convert text to ids and back, exactly."""
        return TokenCodec(self.tokenizer)

    @property
    def turn_end_id(self) -> int | None:
        """Return the token that ends a turn with calls; None where the template has none."""
        return self.marks.turn_end_id

    @property
    def chat_template(self) -> str:
        """Return the Jinja text in use."""
        return self.template.text

    @property
    def thinking_switch(self) -> str | None:
        """Return the template's own name for its thinking switch; None where it has none."""
        return self.template.thinking_switch

    def with_thinking(self, thinking: bool) -> "ChatFormat":
        """Return the same format with the template's thinking switch set, for every render.

        Raises:
            ChatTemplateError: the template has no switch.
        """
        return dataclasses.replace(self, template=self.template.with_switch(thinking))

    # ---- tools ----

    def check_tools(self, tools: Iterable[Tool]) -> None:
        """Check that the model can call these tools: write an example call and read it back.

        Raises:
            ToolDefinitionError: one can't be called; says why and what to do.
        """
        for tool in tools:
            if problem := self._tool_problem(tool.schema_text):
                raise ToolDefinitionError(problem)

    @property
    def tool_check(self) -> ToolCheck:
        """Return what writes calls with this template and reads them back."""
        return ToolCheck(
            template=self.template,
            codec=self.codec,
            parse=self.parse,
            end_token_ids=self.end_token_ids,
        )

    @functools.cached_property
    def _tool_problem(self) -> Callable[[str], str | None]:
        """Check each tool once, by its schema's text: a cached tool would keep its environment."""

        def problem(schema_text: str) -> str | None:
            return self.tool_check.problem(Tool(schema=json.loads(schema_text), function=_not_run))

        return functools.lru_cache(maxsize=4096)(problem)

    # ---- conversations to ids ----

    def prompt_ids(self, messages: Messages, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the ids of a conversation that waits for the assistant: `[P]`.

        Raises:
            ChatTemplateError: the template refuses the conversation, or it holds more than text.
        """
        return self.codec.encode(self.template.render(messages, tools, add_generation_prompt=True))

    def suffix_ids(
        self,
        results: Sequence[ToolResult],
        tools: Sequence[Tool] = (),
        *,
        last_token_id: int | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return what the template writes after a turn that called tools: results and header.

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
        if self.marks.after_turn_end is not None:
            added = self.codec.token_text(self.turn_end_id) + self.marks.after_turn_end + added
        ids = self.codec.encode(added)
        return ids[1:] if last_token_id == self.turn_end_id else ids

    def truncate(self, text: str, max_tokens: int) -> str:
        """Return the text's beginning in at most `max_tokens` tokens, marked if it was cut."""
        ids = self.codec.encode(self.as_data(text))
        if len(ids) <= max_tokens:
            return text
        mark = _TRUNCATION_MARK.format(num_cut=len(ids))
        kept = max(max_tokens - len(self.codec.encode(mark)), 0)
        mark = _TRUNCATION_MARK.format(num_cut=len(ids) - kept)
        return self.codec.decode(ids[:kept]).rstrip("�") + mark

    def as_data(self, text: str) -> str:
        """Return the text for a render; the control tokens that it spells stay text."""
        return self.codec.as_data(text) if self.escape_tool_results else text

    def _encode_added(self, before: str, added: str) -> list[int]:
        """Return the ids of text added to text that no control token ends."""
        ids = self.codec.encode(before)
        whole = self.codec.encode(before + added)
        if whole[: len(ids)] != ids:
            raise ChatTemplateError(NOT_EXTENDABLE.format(reason="a tool turn changes them"))
        return whole[len(ids) :]

    # ---- sampled ids to messages ----

    def parse(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int] = (),
        tools: Sequence[Tool] | None = None,
        *,
        is_cut: bool = False,
    ) -> ParsedTurn:
        """Read one sampled turn as a message and its calls. Any ids give a value, never an error.

        Args:
            token_ids: as sampled, with the end token if there was one.
            prompt_ids: the ids before them; show whether the turn starts inside a thinking block.
            tools: the tools on offer; some families write values whose type only the schema tells.
                Where none are offered, nothing is a call. None: it is not known which are.
            is_cut: the turn ran into a limit. Nothing in it is a call.
        """
        text = self.decode_turn(token_ids)
        turn = SampledTurn(
            text=text,
            prefix=self.codec.decode(prompt_ids[-_HEADER_TOKENS:]),
            end="" if is_cut else self._end_text(token_ids),
            tools=[tool.schema for tool in tools or ()],
        )
        parsed = self.parser(turn)
        if is_cut or (tools is not None and not tools):
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
        """Return the turn's text without its end token, special tokens kept."""
        ids = list(token_ids)
        if ids and ids[-1] in self.end_token_ids:
            ids.pop()
        return self.codec.decode(ids)

    def _sign_of_calls(self, content: str, token_ids: Sequence[int]) -> str:
        """Return what only turns with calls have, if this one has it: a mark, or their own end."""
        if self.marks.call_mark and self.marks.call_mark in content:
            return self.marks.call_mark
        last = token_ids[-1] if token_ids else None
        is_call_end = last == self.turn_end_id and last != self.marks.answer_end_id
        return self.codec.decode([last]) if last is not None and is_call_end else ""

    def _end_text(self, token_ids: Sequence[int]) -> str:
        """Return the end that parsers expect: as sampled if the template has it, else its own."""
        last = token_ids[-1] if token_ids else None
        known = last if last in self.marks.end_ids else self.turn_end_id
        return "" if known is None else self.codec.token_text(known)


def _not_run(**_: Any) -> None: ...


def known_ends(tokenizer: PreTrainedTokenizerBase, more: Sequence[int]) -> tuple[int, ...]:
    """Return the ids that end a turn: the tokenizer's, then `more`.

    Raises:
        ChatTemplateError: there are none.
    """
    ids = [tokenizer.eos_token_id, *more]
    found = tuple(dict.fromkeys(token for token in ids if token is not None))
    if not found:
        raise ChatTemplateError(
            "No end-of-turn token is known. Set `tokenizer.eos_token` to the token that ends an "
            "assistant turn."
        )
    return found
