"""Encode text and decode ids with one tokenizer.

Invariant: encoding adds no special tokens, decoding drops none, and text that `as_data` has marked
never becomes an added token.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

_SEAM = "\ufdd0"  # a noncharacter: the text is encoded apart on its two sides


@dataclasses.dataclass(frozen=True)
class TokenCodec:
    """Convert text to ids and back, without the tokenizer's extras."""

    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates have no token
        parts = [part for part in text.split(_SEAM) if part]
        encode = functools.partial(self.tokenizer, add_special_tokens=False)
        return [token for part in parts for token in encode(part)["input_ids"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        if self.tokenizer.is_fast:  # its own `decode` first looks at each id in Python
            backend = cast(Any, self.tokenizer).backend_tokenizer
            return backend.decode(list(token_ids), skip_special_tokens=False)
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return cast(str, text)

    def as_data(self, text: str) -> str:
        """Return the text with a seam inside each control token that it spells.

        Encoded, alone or inside a render, it holds no added token.
        """
        text = text.replace(_SEAM, "�")
        starts = [match.start() + 1 for match in self._control_text.finditer(text)]
        cuts = [0, *starts, len(text)]
        return _SEAM.join(text[a:b] for a, b in itertools.pairwise(cuts))

    @functools.cached_property
    def token_text(self) -> Callable[[int], str]:
        """Decode one end token; cached, since decoding one id takes as long as a whole turn."""
        return functools.lru_cache(maxsize=16)(lambda token: self.decode([token]))

    @property
    def added_tokens(self) -> list[str]:
        return list(cast(Any, self.tokenizer).get_added_vocab())

    @functools.cached_property
    def control_ids(self) -> frozenset[int]:
        added = cast(dict[int, Any], self.tokenizer.added_tokens_decoder)
        special = {index for index, token in added.items() if token.special}
        return frozenset(special.union(self.tokenizer.all_special_ids))

    @functools.cached_property
    def _control_text(self) -> re.Pattern[str]:
        """Return a pattern that matches before every place where an added token's text begins."""
        texts = sorted(map(re.escape, self.added_tokens), key=len, reverse=True)
        return re.compile(f"(?={'|'.join(text for text in texts if len(text) > 1)})")


def num_common(a: Sequence, b: Sequence) -> int:
    """Return the length of the longest common prefix."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))
