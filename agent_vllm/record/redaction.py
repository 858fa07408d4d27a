"""Keeping secrets out of recorded rollouts: from the texts, and from the ids that spell them.

Invariant: once a record has gone through, no text in it matches, and neither do its tokens' texts
put together.
"""

import bisect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agent_vllm.record.schema import RolloutRecord, text_pieces

REDACTED = "[redacted]"
_IDS = ("prompt_ids", "completion_ids")
REDACTED_ID = -1  # no vocabulary has it: such a sequence can be looked at, not trained or replayed


def redact_secrets(*patterns: str | re.Pattern[str]) -> Callable[[RolloutRecord], RolloutRecord]:
    """A `redact` for `RolloutRecorder` and the trainer: whatever matches a pattern is taken out.

    Every text of the record is searched: messages, tool results, turns, the row, names, errors.
    Tokens are searched as the text that they spell together, prompt and completion apart; those
    that touch a match get the id -1. Where the messages match more often than the tokens do
    (which may spell it with other escapes), all tokens get -1: better too much than too little.

    Args:
        patterns: regular expressions, such as r"sk-[A-Za-z0-9]+".

    Example:

    ```python
    trainer = AgentGRPOTrainer(..., redact_rollouts=redact_secrets(r"sk-[A-Za-z0-9]+"))
    ```
    """
    searches = [re.compile(pattern) for pattern in patterns]

    def redact(record: RolloutRecord) -> RolloutRecord:
        texts = {key: value for key, value in record.items() if key not in ("id", "token_texts")}
        cleaned: Any = {**record, **{key: _clean(text, searches) for key, text in texts.items()}}
        num_found = 0
        for name in _IDS:
            found = _matches(text_pieces(record, record[name]), searches)
            cleaned[name] = [
                REDACTED_ID if any(index in match for match in found) else token
                for index, token in enumerate(record[name])
            ]
            num_found += len(found)
        if num_found < _count(record["messages"], searches):
            cleaned |= {name: [REDACTED_ID] * len(record[name]) for name in _IDS}
        kept = {*cleaned["prompt_ids"], *cleaned["completion_ids"]}
        spelled = {**record["token_texts"], str(REDACTED_ID): REDACTED}
        cleaned["token_texts"] = {
            token: text for token, text in spelled.items() if int(token) in kept
        }
        return cleaned

    return redact


def _texts(value: Any) -> Iterator[str]:
    """Every text in it, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.items():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _count(value: Any, searches: Sequence[re.Pattern[str]]) -> int:
    return sum(len(search.findall(text)) for search in searches for text in _texts(value))


def _clean(value: Any, searches: Sequence[re.Pattern[str]]) -> Any:
    if isinstance(value, str):
        for search in searches:
            value = search.sub(REDACTED, value)
        return value
    if isinstance(value, Mapping):
        return {_clean(key, searches): _clean(item, searches) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item, searches) for item in value]
    return value


def _matches(pieces: Sequence[str], searches: Sequence[re.Pattern[str]]) -> list[range]:
    """The tokens, by index, that hold some of each match."""
    ends = list(itertools.accumulate(map(len, pieces)))
    text = "".join(pieces)
    return [
        range(bisect.bisect_right(ends, match.start()), bisect.bisect_left(ends, match.end()) + 1)
        for search in searches
        for match in search.finditer(text)
        if match.group()
    ]
