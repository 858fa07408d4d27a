"""Choose the chat template and render conversations and tool turns with it.

Knows text only, no token ids. Invariant: a template that would rewrite what was sampled is never
used.
"""

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jinja2
from transformers import PreTrainedTokenizerBase

from agent_vllm.chat.messages import for_template
from agent_vllm.errors import ChatTemplateError
from agent_vllm.tools import Tool
from agent_vllm.types import Messages, ToolCall, ToolResult

Calls = tuple[tuple[str, str | None], ...]  # names, and ids where the model wrote them

_THINKING_SWITCHES = ("enable_thinking", "open_thinking", "thinking")
PROBE_RESULTS = [
    ToolResult(name=name, content=content, status="ok")
    for name, content in [("get_weather", "12 degrees"), ("get_time", "noon")]
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """One chat template with its fixed arguments.

    Attributes:
        tokenizer: renders the template.
        text: the Jinja text.
        kwargs: passed to every render.
        thinking_switch: the template's own name for its thinking switch, None if it has none.
        one_call_per_turn: the template writes only one call and its result per turn; several
            results are written as if each had followed a call of its own.
    """

    tokenizer: PreTrainedTokenizerBase
    text: str
    kwargs: Mapping[str, Any]
    thinking_switch: str | None = None
    one_call_per_turn: bool = False

    def render(
        self, messages: Messages, tools: Sequence[Tool] = (), *, add_generation_prompt: bool
    ) -> str:
        """Render the conversation as text.

        Raises:
            ChatTemplateError: the template refuses it, or it holds more than text.
        """
        return self._render(for_template(messages), _schemas(tools), add_generation_prompt)

    def _render(
        self, messages: list[dict[str, Any]], schemas: list[Any], add_generation_prompt: bool
    ) -> str:
        """Render messages and schemas that are not used elsewhere: templates may write to them."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=schemas or None,  # some templates test `is none`
                chat_template=self.text,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.kwargs,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"The chat template has an error: {error}") from error
        except Exception as error:  # a template is a program, given what a dataset or tool holds
            raise ChatTemplateError(
                f"The chat template refused the conversation: {error}. Roles were "
                f"{[message.get('role') for message in messages]}."
            ) from error
        return cast(str, text)

    def tool_turn(self, results: Sequence[ToolResult], tools: Sequence[Tool] = ()) -> str:
        """Render the shortest conversation that ends with these results' calls."""
        results = results[:1] if self.one_call_per_turn else results
        calls = tuple((result.name, result.call_id) for result in results)
        return self._written_calls(calls, tuple(tool.schema_text for tool in tools))

    @functools.cached_property
    def _written_calls(self) -> Callable[[Calls, tuple[str, ...]], str]:
        """Render once for all turns that make the same calls; arguments are left out.

        The cache holds the schemas' text, since a cached tool would keep its environment or process
        alive.
        """

        def render(calls: Calls, schema_texts: tuple[str, ...]) -> str:
            return self._render(_calling(calls), list(map(json.loads, schema_texts)), False)

        return functools.lru_cache(maxsize=256)(render)

    def after_tool_turn(
        self,
        results: Sequence[ToolResult],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Return what the template adds to `tool_turn`: the results, and the next turn's header.

        Raises:
            ChatTemplateError: the template rewrites the turn instead of adding to it.
        """
        if self.one_call_per_turn and len(results) > 1:
            parts = [[result] for result in results]
            first = [
                self.after_tool_turn(part, tools, add_generation_prompt=False)
                for part in parts[:-1]
            ]
            last = self.after_tool_turn(
                parts[-1], tools, add_generation_prompt=add_generation_prompt
            )
            return "".join([*first, last])
        before = self.tool_turn(results, tools)
        calls = tuple((result.name, result.call_id) for result in results)
        answers = [
            {**result.message, "tool_call_id": call_id}
            for result, call_id in zip(results, _call_ids(calls), strict=True)
        ]
        messages = [*_calling(calls), *answers]
        after = self._render(messages, _schemas(tools), add_generation_prompt)
        if not after.startswith(before):  # a date in it may have passed since it was kept
            before = self._render(_calling(calls), _schemas(tools), False)
        if not after.startswith(before):
            raise ChatTemplateError(NOT_EXTENDABLE.format(reason="a tool turn follows"))
        return after[len(before) :]

    def written_turn(self, call: ToolCall | None) -> tuple[str, str]:
        """Render a prompt, and the same with an assistant turn: this call, or an answer."""
        turn: dict[str, Any] = {"role": "assistant", "content": "" if call else "It is noon."}
        if call is not None:
            turn["tool_calls"] = [call.as_message()]
        prompt = self.render([_USER], add_generation_prompt=True)
        return prompt, self.render([_USER, turn], add_generation_prompt=False)

    def why_not(self) -> str | None:
        """Return why the template can't be extended turn by turn, or None if it can."""
        try:
            for results in (PROBE_RESULTS[:1], PROBE_RESULTS):
                plain = self.after_tool_turn(results, add_generation_prompt=False)
                opened = self.after_tool_turn(results, add_generation_prompt=True)
                if not opened.startswith(plain):
                    return "the generation prompt changes them"
        except ChatTemplateError as error:
            return str(error)
        return None

    def with_switch(self, value: bool) -> "ChatTemplate":
        """Return the same template with its thinking switch set.

        Raises:
            ChatTemplateError: it has none.
        """
        if self.thinking_switch is None:
            raise ChatTemplateError(
                "The chat template has no thinking switch (looked for "
                f"{', '.join(_THINKING_SWITCHES)}). Leave `thinking_ratio` unset."
            )
        kwargs = {**self.kwargs, self.thinking_switch: value}
        return dataclasses.replace(self, kwargs=kwargs)


def choose_template(
    tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], *, needs_tools: bool
) -> ChatTemplate:
    """Return the tokenizer's template, or TRL's training variant if only that can be extended.

    Raises:
        ChatTemplateError: there is no template, or it has an error, does not support tools, or
            can't be extended.
    """
    text = _template_text(tokenizer)
    own = ChatTemplate(tokenizer=tokenizer, text=text, kwargs=kwargs)
    own = dataclasses.replace(own, thinking_switch=_find_thinking_switch(own))
    if not needs_tools:
        return own
    _check_tool_support(tokenizer, text)
    own = _with_call_habit(own)
    reason = own.why_not()
    if reason is None:
        return own
    variant = _training_variant(tokenizer, text)
    if variant is not None:
        trained = _with_call_habit(dataclasses.replace(own, text=variant, one_call_per_turn=False))
        reason = trained.why_not()
        if reason is None:
            return trained
    raise ChatTemplateError(reason)


NOT_EXTENDABLE = (
    "The chat template can't be extended turn by turn: it renders earlier turns differently once "
    "{reason}. Use a template that keeps its prefix, such as TRL's training variants "
    "(trl.chat_template_utils.get_training_chat_template)."
)

_USER = {"role": "user", "content": "What is it like in Oslo?"}


def _schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [dict(tool.schema) for tool in tools]


def _call_ids(calls: Calls) -> list[str]:
    """Return the model's own ids, or new ones in the form that Mistral's templates require."""
    return [call_id or f"call{index:05d}" for index, (_, call_id) in enumerate(calls)]


def _calling(calls: Calls) -> list[dict[str, Any]]:
    drafted = [
        ToolCall(name=name, arguments={}, id=call_id).as_message()
        for (name, _), call_id in zip(calls, _call_ids(calls), strict=True)
    ]
    return [dict(_USER), {"role": "assistant", "content": "", "tool_calls": drafted}]


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    if not template:
        raise ChatTemplateError(no_template(tokenizer))
    return template


def no_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the error's text for a conversation without a template."""
    return (
        f"The tokenizer of {tokenizer.name_or_path!r} has no chat template. Set "
        "`tokenizer.chat_template` to one with tool support."
    )


def _check_tool_support(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    from trl.chat_template_utils import supports_tool_calling

    if not supports_tool_calling(_with_template(tokenizer, text)):
        raise ChatTemplateError(
            f"The chat template of {tokenizer.name_or_path!r} does not support tools: rendering a "
            "user turn, an assistant turn with `tool_calls` and a tool turn fails or loses a part. "
            "Use a tool-capable template."
        )


def _training_variant(tokenizer: PreTrainedTokenizerBase, text: str) -> str | None:
    from trl.chat_template_utils import get_training_chat_template

    try:
        return get_training_chat_template(_with_template(tokenizer, text))
    except ValueError:  # TRL has none
        return None


def _with_template(tokenizer: PreTrainedTokenizerBase, text: str) -> PreTrainedTokenizerBase:
    other = copy.copy(tokenizer)
    other.chat_template = text
    return other


def _with_call_habit(template: ChatTemplate) -> ChatTemplate:
    """Find out whether the template writes several calls in one turn, and each result's name."""
    try:
        alone = template.after_tool_turn(PROBE_RESULTS[1:], add_generation_prompt=False)
        both = template.after_tool_turn(PROBE_RESULTS, add_generation_prompt=False)
        name = PROBE_RESULTS[1].name
        is_written = name in both or name not in alone
    except ChatTemplateError:
        is_written = False
    return dataclasses.replace(template, one_call_per_turn=not is_written)


def _find_thinking_switch(template: ChatTemplate) -> str | None:
    """Return the first known name that changes a prompt."""

    def prompt(**switch: bool) -> str:
        other = dataclasses.replace(template, kwargs={**template.kwargs, **switch})
        return other.render([_USER], add_generation_prompt=True)

    try:
        return next(
            (n for n in _THINKING_SWITCHES if prompt(**{n: True}) != prompt(**{n: False})), None
        )
    except ChatTemplateError as error:
        if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
            raise
        return None  # it wants more than a user's turn
