"""Read turns with a transformers response template; TRL has one for many model families.

https://huggingface.co/docs/transformers/main/en/chat_response_parsing. The template says where a
field begins and ends. This module finds the fields; transformers reads the calls, one at a time.
Invariant: any text gives a `ParsedTurn`, and a call that can't be read spoils no other call.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex
from transformers.utils.chat_parsing import parse_response

from agent_vllm.chat.parsing.turn import SampledTurn
from agent_vllm.tools.schema import allowed_types, type_of
from agent_vllm.types import ParsedTurn, ToolCall

_CALLS = "tool_calls"
_LOOSE_KEY = regex.compile(r"([{,]\s*+)([\w.-]++)\s*+:")
_PYTHON_NULL = regex.compile(r"\bNone\b")
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class ResponseTemplateParser:
    """Parse turns by `tokenizer.response_template`.

    Args:
        template: the response template, a mapping as transformers documents it.

    Raises:
        ValueError: the template has no field `tool_calls`, or a pattern that does not compile.
    """

    def __init__(self, template: Mapping[str, Any]) -> None:
        fields = template.get("fields", {})
        if _CALLS not in fields:
            raise ValueError(
                f"A response template must have a field {_CALLS!r}, got {list(fields)}."
            )
        self.template = template
        self._anchor = _pattern(template, "start_anchor")
        self._fields = [_Field.of(name, spec) for name, spec in fields.items()]
        self._has_json = fields[_CALLS].get("content") == "json"  # which says its own types
        self._reader = _Tags.of(fields[_CALLS]) or _LooseJson.of(fields[_CALLS])
        self._call_template = {
            key: template[key]
            for key in ("start_anchor", "start_anchor_pattern")
            if key in template
        } | {"fields": {_CALLS: fields[_CALLS]}}

    def __call__(self, turn: SampledTurn) -> ParsedTurn:
        text = self._header(turn.prefix) + turn.text + turn.end
        pieces: dict[str, list[str]] = {"content": []}
        calls: list[ToolCall] = []
        for field, region, body in self._regions(text):
            if field.name == _CALLS:
                call = self._read_call(region, turn)
                calls.append(call)
                if call.error is not None:
                    pieces["content"].append(region.removesuffix(turn.end))
            else:
                body = body.strip().removesuffix(turn.end).strip()
                pieces.setdefault(field.name, []).append(body)
        if pieces == {"content": []} and not calls:  # none of the family's marks: all is content
            pieces["content"].append(turn.text.strip())
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        message |= {name: "\n".join(filter(None, texts)) for name, texts in pieces.items()}
        message = {k: v for k, v in message.items() if v or k == "content"}
        if readable := [call for call in calls if call.error is None]:
            message[_CALLS] = [call.as_message() for call in readable]
        return ParsedTurn(message=message, calls=calls)

    def _header(self, prefix: str) -> str:
        """Return what the prompt already holds of this turn after its header."""
        anchors = list(self._anchor.finditer(prefix)) if self._anchor else []
        return prefix[anchors[-1].end() :] if anchors else ""

    def _regions(self, text: str) -> Iterator[tuple["_Field", str, str]]:
        """Yield each field in order, with its whole text and the text between its marks."""
        rest = next((field for field in self._fields if field.open is None), None)
        finders = [_Finder(field, text) for field in self._fields if field.open is not None]
        position = 0
        while position < len(text):
            found = [(match, field) for finder in finders for match, field in finder.at(position)]
            opening, field = min(
                found, key=lambda f: (f[0].start(), -f[0].end()), default=(None, None)
            )
            end = len(text) if opening is None else opening.start()
            if rest is not None and end > position:
                yield rest, text[position:end], _without_end(text[position:end], rest)
            if opening is None or field is None:
                return
            close = field.close.search(text, opening.end()) if field.close else None
            body_end, position = (close.start(), close.end()) if close else (len(text), len(text))
            yield field, text[opening.start() : position], text[opening.end() : body_end]

    def _read_call(self, region: str, turn: SampledTurn) -> ToolCall:
        try:
            if self._reader is not None:
                name, arguments = self._reader.read(region, turn.tools)
            else:
                tools: list[Any] = [] if self._has_json else [dict(t) for t in turn.tools]
                message = parse_response(region, self._call_template, prefix="", tools=tools)
                function = message[_CALLS][0]["function"]
                name, arguments = function["name"], function.get("arguments")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            return _unreadable(str(error).splitlines()[-1] if str(error) else type(error).__name__)
        if not isinstance(name, str) or not name:
            return _unreadable("it has no name")
        if isinstance(arguments, str):
            arguments = _loads(arguments)
        if arguments is not None and not isinstance(arguments, dict):
            return ToolCall(name=name, arguments=None, error="The arguments are not a JSON object.")
        return ToolCall(name=name, arguments=arguments or {})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tags:
    """Read calls whose arguments are tags, such as `<parameter=city>Oslo</parameter>`.

    transformers uses one pattern for them, whose time is cubic in the length of white space.
    """

    call: Any  # has a group `name`
    open: Any  # has a group `key`
    close: Any
    end: Any  # of the whole call
    on_own_lines: bool  # a value has a line break of its own on each side

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> "_Tags | None":
        pattern = spec.get("content_args", {}).get("tag_pattern", "")
        call = _pattern(spec, "open")
        if pattern.count(".*?") != 1 or "name" not in call.groupindex:
            return None
        start, end = pattern.split("(?P<value>.*?)")
        start = start.replace("]+)", "]{1,256}+)")  # a flood of openings is read once
        return cls(
            call=call,
            open=regex.compile(start.removesuffix(r"\s*")),
            close=regex.compile(end.removeprefix(r"\s*")),
            end=_pattern(spec, "close"),
            on_own_lines=start.endswith(r"\s*"),
        )

    def read(self, region: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
        """Return name and arguments of the call that the region begins with."""
        head = self.call.match(region)
        name = head["name"].strip()
        parameters = _parameters(name, tools)
        arguments: dict[str, Any] = {}
        position = head.end()
        while opening := self.open.search(region, position):
            _check_gap(region[position : opening.start()])
            key = opening["key"].strip()
            closing = self.close.search(region, opening.end())
            if closing is None:
                raise ValueError(f"the argument {key!r} has no closing tag")
            value = region[opening.end() : closing.start()]
            if self.on_own_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = _typed(value, key, parameters)
            position = closing.end()
        _check_gap(self.end.sub("", region[position:]))
        return name, arguments


def _check_gap(text: str) -> None:
    """Check that only white space and the function's closing tag surround the arguments."""
    if text.strip() not in ("", "</function>"):
        raise ValueError(f"there is text that is no argument, {text.strip()[:40]!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _LooseJson:
    """Read calls in JSON with unquoted keys and marks around text, such as `{city:|Oslo|}`.

    transformers takes time quadratic in the number of marks. Python's None, which templates write
    too, is null.
    """

    call: Any  # has a group `name`
    close: Any
    quote: str

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> "_LooseJson | None":
        quotes = spec.get("content_args", {}).get("string_delims", [])
        call = _pattern(spec, "open")
        if len(quotes) != 1 or len(set(quotes[0])) != 1 or "name" not in call.groupindex:
            return None
        # Templates write names as they are; TRL's pattern knows those of Python.
        call = regex.compile(call.pattern.replace(r"\w+)", r"[^\s{<]{1,256}+)"), regex.DOTALL)
        return cls(call=call, close=_pattern(spec, "close"), quote=quotes[0][0])

    def read(self, region: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, Any]:
        """Return name and arguments of the call that the region begins with."""
        head = self.call.match(region)
        close = self.close.search(region, head.end())
        if close is None:
            raise ValueError("it has no closing mark")
        pieces = region[head.end() : close.start()].split(self.quote)
        if len(pieces) % 2 == 0:
            raise ValueError("a text in it has no end")
        for index, piece in enumerate(pieces):
            is_text = index % 2 == 1
            pieces[index] = json.dumps(piece) if is_text else _as_strict_json(piece)
        return head["name"], json.loads("".join(pieces))


def _as_strict_json(piece: str) -> str:
    """Quote the keys of the JSON between two texts."""
    return _PYTHON_NULL.sub("null", _LOOSE_KEY.sub(r'\1"\2":', piece))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Field:
    name: str
    open: Any  # None for the field that is whatever no other field takes
    close: Any

    @classmethod
    def of(cls, name: str, spec: Mapping[str, Any]) -> "_Field":
        return cls(name=name, open=_pattern(spec, "open"), close=_pattern(spec, "close"))

    @property
    def is_lookahead(self) -> bool:
        return self.open.pattern.startswith("(?=")


class _Finder:
    """Find the next opening of one field; scans each character once, as positions only grow."""

    def __init__(self, field: _Field, text: str) -> None:
        self._field = field
        self._text = text
        self._match: Any = None
        self._is_over = False

    def at(self, position: int) -> list[tuple[Any, _Field]]:
        if self._is_over:
            return []
        if self._match is None or self._match.start() < position:
            # A pattern that only looks ahead opens its field where it stands, or never.
            look = self._field.open.match if self._field.is_lookahead else self._field.open.search
            self._match = look(self._text, position)
            self._is_over = self._match is None
        return [] if self._is_over else [(self._match, self._field)]


def _pattern(spec: Mapping[str, Any], key: str) -> Any:
    """Compile a mark of the template: a pattern, a literal, or several literals."""
    pattern = spec.get(f"{key}_pattern")
    if pattern is None:
        literals = spec.get(key)
        if literals is None:
            return None
        literals = [literals] if isinstance(literals, str) else sorted(literals, key=len)[::-1]
        pattern = "|".join(map(regex.escape, literals))
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        message = f"The response template's {key} {pattern!r} does not compile: {error}"
        raise ValueError(message) from error


def _without_end(text: str, field: _Field) -> str:
    """Remove what closes the rest field, which ends with the turn."""
    close = field.close.search(text) if field.close else None
    return text[: close.start()] + text[close.end() :] if close else text


def _parameters(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    functions = (tool.get("function", {}) for tool in tools)
    schema = next((f for f in functions if f.get("name") == name), {})
    return schema.get("parameters") or {}


def _typed(text: str, key: str, parameters: Mapping[str, Any]) -> Any:
    """Return a tag's value: its text if the schema allows only text or doesn't know it, else JSON.

    Where text and others are allowed, JSON of an allowed type is read as such.
    """
    properties = parameters.get("properties") or {}
    if key not in properties:
        return text
    types = allowed_types(properties[key], parameters)
    if types <= {"string"}:
        return text
    word = text.strip().lower()
    value = _WORDS[word] if word in _WORDS else _loads(text)
    if "string" not in types:
        return value
    is_meant = text == text.strip() and type_of(value) in types - {"string"}
    return value if is_meant else text


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _unreadable(reason: str) -> ToolCall:
    return ToolCall(name="unknown", arguments=None, error=f"The call could not be read: {reason}.")
