"""Keep secrets out of recorded rollouts: texts, keys, numbers, and the ids that spell them.

Invariant: nothing in a redacted record matches, as it is or decoded, and neither do its tokens'
texts put together.
"""

import base64
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

REDACTED = "[redacted]"
REDACTED_ID = -1  # in no vocabulary: such a sequence can be looked at, not trained on or replayed

_KEPT = ("id", "token_texts")
_FREE = ("messages", "row", "arguments")  # here keys and numbers are the user's, too
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[-+.\deE]*')  # of JSON
_ESCAPE = re.compile(r"\\(?:u([\da-fA-F]{4})|(.))", re.S)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_BASE64 = re.compile(r"[\w+/-]{8,}={0,2}", re.A)
_MAX_LAYERS = 3  # such as JSON in a text in JSON


def redact_secrets(*patterns: str | re.Pattern[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Make a `redact` for `RolloutRecorder` and the trainer that removes all matches of patterns.

    Every text of the record is searched, and every key and number of messages, arguments and the
    row. A text that matches only once escapes (as in JSON), percent-encoding or base64 are decoded
    is removed as a whole. Tokens are searched as the text that they spell together, and those that
    touch a match get the id -1. All tokens get it if their text matches decoded, if the messages
    match more often, or if no tokenizer spells them: better too much than too little.

    Args:
        patterns: regular expressions, such as r"sk-[A-Za-z0-9]+".

    Example:

    ```python
    trainer = AgentGRPOTrainer(..., redact_rollouts=redact_secrets(r"sk-[A-Za-z0-9]+"))
    ```
    """
    return _Redaction([re.compile(pattern) for pattern in patterns])


class _Redaction:
    def __init__(self, searches: list[re.Pattern[str]]) -> None:
        self._searches = searches

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        cleaned = {
            name: value if name in _KEPT else self._clean(value, is_free=name in _FREE)
            for name, value in record.items()
        }
        segments = (turn[name] for turn in cleaned["turns"] for name in ("segment", "suffix"))
        token_lists = [cleaned["prompt_ids"], *(s["token_ids"] for s in segments if s)]
        texts = {**record["token_texts"], str(REDACTED_ID): REDACTED}
        literals = map(_value_text, _LITERAL.findall(json.dumps(record["messages"])))
        said = Counter(match[0] for text in literals for match in self._matches(text))
        ids = self._without_matches(list(itertools.chain(*token_lists)), texts, said)
        cleaned["token_texts"] = {token: texts[token] for token in map(str, set(ids))}
        remaining = iter(ids)
        for tokens in token_lists:
            tokens[:] = itertools.islice(remaining, len(tokens))
        return cleaned

    def _clean(self, value: Any, is_free: bool = False) -> Any:
        if is_free:
            return json.loads(_LITERAL.sub(self._clean_literal, json.dumps(value)))
        if isinstance(value, dict):
            return {name: self._clean(item, name in _FREE) for name, item in value.items()}
        if isinstance(value, list):
            return [self._clean(item) for item in value]
        return self._clean_text(value) if isinstance(value, str) else value

    def _clean_literal(self, literal: re.Match[str]) -> str:
        text = _value_text(literal[0])
        cleaned = self._clean_text(text)
        return literal[0] if cleaned == text else json.dumps(cleaned)

    def _clean_text(self, text: str) -> str:
        for search in self._searches:
            text = search.sub(lambda match: match[0] and REDACTED, text)
        return REDACTED if self._matches_decoded(text) else text

    def _without_matches(
        self, ids: list[int], texts: dict[str, str], said: Counter[str]
    ) -> list[int]:
        """Blank the tokens that hold some of a match, or all if others may spell one."""
        pieces = [texts.get(str(token), "") for token in ids]
        owners = [place for place, piece in enumerate(pieces) for _ in piece]
        for match in self._matches("".join(pieces)):
            first, last = owners[match.start()], owners[match.end() - 1]
            ids[first : last + 1] = [REDACTED_ID] * (last + 1 - first)
            said[match[0]] -= 1
        left = "".join(texts.get(str(token), "") for token in ids)
        is_known = texts.keys() >= set(map(str, ids)) and max(said.values(), default=0) <= 0
        return ids if is_known and not self._matches_decoded(left) else [REDACTED_ID] * len(ids)

    def _matches(self, text: str) -> Iterator[re.Match[str]]:
        return (match for search in self._searches for match in search.finditer(text) if match[0])

    def _matches_decoded(self, text: str) -> bool:
        for _ in range(_MAX_LAYERS):
            text = _BASE64.sub(_from_base64, unquote(_ESCAPE.sub(_unescaped, text)))
            if any(self._matches(text)):
                return True
        return False


def _value_text(literal: str) -> str:
    value = json.loads(literal)
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] else _ESCAPED.get(match[2], match[2])


def _from_base64(match: re.Match[str]) -> str:
    try:
        return base64.b64decode(match[0].replace("-", "+").replace("_", "/") + "==").decode()
    except ValueError:
        return match[0]
