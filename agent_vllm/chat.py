"""Conversations to token ids, and sampled ids back to a message. Owns the chat template.

Invariant: ids that were sampled are never decoded and encoded again. The next prompt is all ids so
far plus `suffix_ids`, which are found by construction from the template and hold only what the
template and the tools wrote.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.meta
from transformers import PreTrainedTokenizerBase

from agent_vllm.errors import ChatTemplateError
from agent_vllm.parsing import parse_hermes
from agent_vllm.tools import Tool
from agent_vllm.types import Messages, ParsedTurn, ToolResult

_THINKING_SWITCHES = ("enable_thinking", "open_thinking", "thinking")
_TRUNCATION_MARK = "\n[... {num_cut} tokens cut]"

ResponseParser = Callable[[str, bool], ParsedTurn]
"""Reads one assistant turn: its text without the end token, and whether it starts inside a thinking
block. Must return a value for any text, however malformed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How one tokenizer's chat template turns conversations into ids and back.

    Build it with `ChatFormat.from_tokenizer`, which checks the template.

    Attributes:
        chat_template: the Jinja text in use.
        template_kwargs: passed to every render; `with_thinking` sets the thinking switch in it.
        thinking_switch: the template's own name for it, None where it has none.
        end_token_ids: ids that end an assistant turn; the first is the one the template writes.
        parser: reads assistant turns.
    """

    tokenizer: PreTrainedTokenizerBase
    chat_template: str
    template_kwargs: Mapping[str, Any]
    thinking_switch: str | None
    end_token_ids: tuple[int, ...]
    parser: ResponseParser = parse_hermes

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        *,
        eos_token_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        parser: ResponseParser = parse_hermes,
        needs_tools: bool = True,
    ) -> "ChatFormat":
        """Check the template at token level and settle which one is used.

        A template that rewrites earlier turns is replaced by TRL's training variant where TRL ships
        one (https://huggingface.co/docs/trl/main/en/chat_templates).

        Args:
            eos_token_ids: further ids that end a turn, as `generation_config.eos_token_id` lists
                them.
            template_kwargs: fixed arguments for every render.
            parser: reads assistant turns; the default knows the Hermes form that Qwen and many
                others use, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
            needs_tools: False skips the checks that only tool turns need.

        Raises:
            ChatTemplateError: no template, none that supports tools, or one that can't be extended.
        """
        template = _template_text(tokenizer)
        thinking_switch = _find_thinking_switch(template)
        if needs_tools:
            template = _extendable_template(tokenizer, template)
        chat = cls(
            tokenizer=tokenizer,
            chat_template=template,
            template_kwargs=dict(template_kwargs or {}),
            thinking_switch=thinking_switch,
            end_token_ids=_end_token_ids(tokenizer, eos_token_ids),
            parser=parser,
        )
        if needs_tools:
            chat._check_suffix()
        return chat

    def with_thinking(self, thinking: bool) -> "ChatFormat":
        """The same format with the template's thinking switch set, for every render.

        Raises:
            ChatTemplateError: the template has no switch.
        """
        if self.thinking_switch is None:
            raise ChatTemplateError(
                "The chat template has no thinking switch (looked for "
                f"{', '.join(_THINKING_SWITCHES)}). Leave `thinking_ratio` unset."
            )
        kwargs = {**self.template_kwargs, self.thinking_switch: thinking}
        return dataclasses.replace(self, template_kwargs=kwargs)

    def prompt_ids(self, messages: Messages, tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of a conversation that waits for the assistant: `[P]`."""
        return self._encode(self._render(messages, tools, add_generation_prompt=True))

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
        before, after = self._renders_around(results, tools, add_generation_prompt)
        prefix, full = self._encode(before), self._encode(after)
        cut = self._turn_end(prefix)
        if full[:cut] != prefix[:cut]:
            raise ChatTemplateError(_NOT_EXTENDABLE.format(reason="a tool turn changes them"))
        if last_token_id != prefix[cut - 1] and prefix[cut - 1] in self.end_token_ids:
            cut -= 1
        return full[cut:]

    def parse(self, token_ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> ParsedTurn:
        """One sampled turn as a message and its calls. Any ids give a value, never an error.

        Args:
            token_ids: as sampled, with the end token if there was one.
            prompt_ids: what they followed; tells whether the turn starts inside a thinking block.
        """
        return self.parse_text(self.decode_turn(token_ids), prompt_ids)

    def parse_text(self, text: str, prompt_ids: Sequence[int] = ()) -> ParsedTurn:
        """`parse` for a turn that is decoded already."""
        header = self._decode(prompt_ids[-8:])
        return self.parser(text, header.rstrip().endswith("<think>"))

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """The turn's text without its end token, special tokens kept (tags can be special)."""
        ids = list(token_ids)
        if ids and ids[-1] in self.end_token_ids:
            ids.pop()
        return self._decode(ids)

    def truncate(self, text: str, max_tokens: int) -> str:
        """The text's beginning in at most `max_tokens` tokens, marked if anything was cut."""
        ids = self._encode(text)
        if len(ids) <= max_tokens:
            return text
        mark = _TRUNCATION_MARK.format(num_cut=len(ids))
        kept = max(max_tokens - len(self._encode(mark)), 0)
        mark = _TRUNCATION_MARK.format(num_cut=len(ids) - kept)
        return self._decode(ids[:kept]).rstrip("�") + mark

    def _renders_around(
        self, results: Sequence[ToolResult], tools: Sequence[Tool], add_generation_prompt: bool
    ) -> tuple[str, str]:
        """The shortest conversation with these results' calls, rendered without and with them."""
        calls = [
            {"type": "function", "function": {"name": result.name, "arguments": {}}}
            for result in results
        ]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        before = self._render(messages, tools, add_generation_prompt=False)
        messages += [result.message for result in results]
        return before, self._render(messages, tools, add_generation_prompt=add_generation_prompt)

    def _turn_end(self, ids: Sequence[int]) -> int:
        """Position after the last end token; templates may write a newline behind it."""
        ends = [index for index, token in enumerate(ids) if token in self.end_token_ids]
        return ends[-1] + 1 if ends else len(ids)

    def _render(
        self, messages: Messages, tools: Sequence[Tool], *, add_generation_prompt: bool
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                copy.deepcopy([dict(message) for message in messages]),
                tools=[dict(tool.schema) for tool in tools]
                or None,  # some templates test `is none`
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.template_kwargs,
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"The chat template refused the conversation: {error}. Roles were "
                f"{[message.get('role') for message in messages]}."
            ) from error
        return cast(str, text)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return cast(str, text)

    def _encode(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates have no token
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _check_suffix(self) -> None:
        """One and two results, with and without a generation prompt, must extend the turn."""
        result = ToolResult(name="lookup", content="42", status="ok")
        for results in ([result], [result, result]):
            with_header = self.suffix_ids(results)
            without = self.suffix_ids(results, add_generation_prompt=False)
            if with_header[: len(without)] != without:
                raise ChatTemplateError(
                    _NOT_EXTENDABLE.format(reason="the generation prompt changes them")
                )


_NOT_EXTENDABLE = (
    "The chat template can't be extended turn by turn: it renders earlier turns differently once "
    "{reason}. Use a template that keeps its prefix, such as TRL's training variants "
    "(trl.chat_template_utils.get_training_chat_template)."
)


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    if not template:
        raise ChatTemplateError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no chat template. Set "
            "`tokenizer.chat_template` to one with tool support."
        )
    return template


def _extendable_template(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    from trl.chat_template_utils import (
        get_training_chat_template,
        is_chat_template_prefix_preserving,
        supports_tool_calling,
    )

    if not supports_tool_calling(tokenizer):
        raise ChatTemplateError(
            f"The chat template of {tokenizer.name_or_path!r} does not support tools: rendering a "
            "user turn, an assistant turn with `tool_calls` and a tool turn fails or loses a part. "
            "Use a tool-capable template."
        )
    if is_chat_template_prefix_preserving(tokenizer):
        return template
    try:
        return get_training_chat_template(tokenizer) or template
    except ValueError as error:
        raise ChatTemplateError(_NOT_EXTENDABLE.format(reason="a tool turn follows")) from error


def _find_thinking_switch(template: str) -> str | None:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _GenerationTag])
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"The chat template has an error: {error}") from error
    return next((name for name in _THINKING_SWITCHES if name in names), None)


class _GenerationTag(jinja2.ext.Extension):
    """Accepts transformers' `{% generation %}` blocks, so that the template can be read."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own convention

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _end_token_ids(
    tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int]
) -> tuple[int, ...]:
    ids = [tokenizer.eos_token_id, *eos_token_ids]
    found = tuple(dict.fromkeys(token for token in ids if token is not None))
    if not found:
        raise ChatTemplateError(
            "No end-of-turn token is known. Set `tokenizer.eos_token` to the token that ends an "
            "assistant turn."
        )
    return found
