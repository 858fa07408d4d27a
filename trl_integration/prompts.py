"""Turn a TRL trainer's prompts into conversations.

Owns which format writes and reads them. Invariant: where nothing can follow a completion, it is read as
TRL reads it.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from agent_vllm.chat import ChatFormat, DecodedChatFormat, TextFormat
from agent_vllm.types import Messages


def has_text_prompts(prompts: Sequence[Any]) -> bool:
    """Return whether a batch's prompts are text, which TRL tells by the first one."""
    return isinstance(prompts[0], str)


def conversations(
    prompts: Sequence[Any], chat_format: ChatFormat, eos_token_ids: Sequence[int]
) -> tuple[ChatFormat, Sequence[Messages]]:
    """Return the format that writes a batch's prompts, and the prompts as messages."""
    if not has_text_prompts(prompts):
        return chat_format, prompts
    text_format = TextFormat.of(chat_format.tokenizer, eos_token_ids)
    return text_format, [TextFormat.messages(prompt) for prompt in prompts]


def own_format(
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Sequence[int],
    *,
    is_one_answer: bool,
    needs_tools: bool,
    template_kwargs: dict[str, Any],
    escape_tool_results: bool,
) -> ChatFormat:
    """Return the format that suits a tokenizer.

    Args:
        is_one_answer: nothing but one completion of the model follows any prompt.
    """
    if is_one_answer and tokenizer.chat_template is None:
        return TextFormat.of(tokenizer, eos_token_ids)
    is_read_by_template = any(
        getattr(tokenizer, name, None) is not None
        for name in ("response_template", "response_schema")
    )
    is_decoded = is_one_answer and not is_read_by_template  # as in TRL
    return (DecodedChatFormat if is_decoded else ChatFormat).from_tokenizer(
        tokenizer,
        eos_token_ids=eos_token_ids,
        template_kwargs=template_kwargs,
        needs_tools=needs_tools,
        escape_tool_results=escape_tool_results,
    )
