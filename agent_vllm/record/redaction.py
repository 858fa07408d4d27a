"""Keep secrets out of recorded rollouts: out of the texts, and out of the ids that spell them.

Invariant: no text of a redacted record matches, and neither do its tokens' texts put together.
"""

import bisect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"
REDACTED_ID = -1  # in no vocabulary: such a sequence can be looked at, not trained on or replayed
_KEPT = ("id", "token_texts")


def redact_secrets(*patterns: str | re.Pattern[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make a `redact` for `RolloutRecorder` and the trainer that removes all matches of patterns.

    Every text of the record is searched: messages, turns, calls, results, the row, names, errors.
    Tokens are searched as the text that they spell together, prompt and completion apart, and those
    that touch a match get the id -1. If the messages match more often than the tokens (which may
    spell a secret with other escapes), all tokens get -1: better too much than too little.

    Args:
        patterns: regular expressions, such as r"sk-[A-Za-z0-9]+".

    Example:

    ```python
    trainer = AgentGRPOTrainer(..., redact_rollouts=redact_secrets(r"sk-[A-Za-z0-9]+"))
    ```
    """
    searches = [re.compile(pattern) for pattern in patterns]

    def redact(record: dict[str, Any]) -> dict[str, Any]:
        texts = {**record["token_texts"], str(REDACTED_ID): REDACTED}
        cleaned = {
            name: value if name in _KEPT else _clean(value, searches)
            for name, value in record.items()
        }
        sequences = [[cleaned["prompt_ids"]], _completion(cleaned)]
        num_found = sum(_blank(sequence, texts, searches) for sequence in sequences)
        token_lists = [tokens for sequence in sequences for tokens in sequence]
        if num_found < _count(record["messages"], searches):
            for tokens in token_lists:
                tokens[:] = [REDACTED_ID] * len(tokens)
        kept = {str(token) for tokens in token_lists for token in tokens}
        cleaned["token_texts"] = {token: texts[token] for token in kept & texts.keys()}
        return cleaned

    return redact


def _completion(record: Mapping[str, Any]) -> list[list[int]]:
    """Return the id lists that follow the prompt, in order."""
    segments = (turn[name] for turn in record["turns"] for name in ("segment", "suffix"))
    return [segment["token_ids"] for segment in segments if segment]


def _blank(
    sequence: list[list[int]], texts: Mapping[str, str], searches: Sequence[re.Pattern[str]]
) -> int:
    """Blank the tokens that hold some of a match; return the number of matches."""
    ids = list(itertools.chain.from_iterable(sequence))
    pieces = [texts.get(str(token), "") for token in ids]
    ends = list(itertools.accumulate(map(len, pieces)))
    text = "".join(pieces)
    matches = [m for search in searches for m in search.finditer(text) if m.group()]
    for match in matches:
        first, last = (
            bisect.bisect_right(ends, match.start()),
            bisect.bisect_left(ends, match.end()),
        )
        ids[first : last + 1] = [REDACTED_ID] * (last + 1 - first)
    remaining = iter(ids)
    for tokens in sequence:
        tokens[:] = itertools.islice(remaining, len(tokens))
    return len(matches)


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in itertools.chain(value, value.values()):
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _count(value: Any, searches: Sequence[re.Pattern[str]]) -> int:
    return sum(len(search.findall(text)) for search in searches for text in _texts(value))


def _clean(value: Any, searches: Sequence[re.Pattern[str]]) -> Any:
    if isinstance(value, str):
        for search in searches:
            value = search.sub(REDACTED, value)
        return value
    if isinstance(value, dict):
        return {_clean(key, searches): _clean(item, searches) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item, searches) for item in value]
    return value
