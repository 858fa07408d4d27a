"""What a parser is given. A parser is any callable from a `SampledTurn` to a `ParsedTurn`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_vllm.types import ParsedTurn


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTurn:
    """One assistant turn as text, special tokens kept.

    Attributes:
        text: what was sampled, without the end token.
        prefix: the end of the prompt, the header of this turn in it; shows what the template wrote
            of the turn already, such as an opening `<think>`.
        end: the end token's text; empty where the turn has none.
        tools: schemas of the tools on offer.
    """

    text: str
    prefix: str = ""
    end: str = ""
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def starts_in_thinking(self) -> bool:
        """Whether the prompt has opened a `<think>` block that this turn goes on with."""
        return self.prefix.rstrip().endswith("<think>")


ResponseParser = Callable[[SampledTurn], ParsedTurn]
"""Must return a value for any text, however malformed; what it raises becomes a call's error."""
