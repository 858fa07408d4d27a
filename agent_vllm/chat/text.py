"""Completions as plain text, where nothing can be called: what TRL calls the standard format.

Invariant: the text of a completion is what TRL's trainers decode, and the ids of a text prompt are
the tokenizer's own, with its special tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import cast

from transformers import PreTrainedTokenizerBase

from agent_vllm.chat.format import ChatFormat, known_ends
from agent_vllm.chat.template import ChatTemplate, no_template
from agent_vllm.errors import ChatTemplateError
from agent_vllm.tools import Tool
from agent_vllm.types import Messages, ParsedTurn

TEXT_ROLE = "prompt"  # of the message that holds a text prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodedChatFormat(ChatFormat):
    """Read each turn as its decoded text, without special tokens; nothing in it is a call.

    White space and thinking stay as they were sampled.
    """

    def parse(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int] = (),
        tools: Sequence[Tool] | None = None,
        *,
        is_cut: bool = False,
    ) -> ParsedTurn:
        content = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        message = {"role": "assistant", "content": content}
        return ParsedTurn(message=message, calls=[], text=self.decode_turn(token_ids))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFormat(DecodedChatFormat):
    """Write a prompt as its text alone; needs no chat template. Build it with `TextFormat.of`."""

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int] = ()
    ) -> "TextFormat":
        """Build the format; `eos_token_ids` are further ids that end a completion."""
        template = ChatTemplate(tokenizer=tokenizer, text="{{ messages[0]['content'] }}", kwargs={})
        ends = known_ends(tokenizer, eos_token_ids)
        return cls(tokenizer=tokenizer, template=template, end_token_ids=ends)

    @staticmethod
    def messages(text: str) -> Messages:
        """Return a text prompt as a conversation, whose one message has a role of its own."""
        return [{"role": TEXT_ROLE, "content": text}]

    def prompt_ids(self, messages: Messages, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the ids of a text prompt: `[P]`.

        Raises:
            ChatTemplateError: it is a conversation, or it has no token.
        """
        if [message.get("role") for message in messages] != [TEXT_ROLE]:
            raise ChatTemplateError(no_template(self.tokenizer))
        ids = cast(list[int], self.tokenizer(messages[0]["content"])["input_ids"])
        if not ids:
            raise ChatTemplateError("A text prompt must have at least one token, got none.")
        return ids
