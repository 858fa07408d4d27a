"""The input of parsers. A parser is any callable from a `SampledTurn` to a `ParsedTurn`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_vllm.types import ParsedTurn


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTurn:
    """One assistant turn as text, special tokens kept.

    Attributes:
        text: the sampled text, without the end token.
        prefix: the end of the prompt with the header of this turn; shows what the template already
            wrote of the turn, such as an opening `<think>`.
        end: the end token's text; empty if the turn has none.
        tools: schemas of the tools on offer.
    """

    text: str
    prefix: str = ""
    end: str = ""
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def starts_in_thinking(self) -> bool:
        """Return whether the prompt ends inside a `<think>` block that this turn continues."""
        return self.prefix.rstrip().endswith("<think>")


ResponseParser = Callable[[SampledTurn], ParsedTurn]
"""Must return a value for any text, however malformed; an exception becomes a call's error."""
