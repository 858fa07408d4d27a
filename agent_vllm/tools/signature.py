"""Describe a function's arguments: a JSON schema for the model, and converters to what hints say.

Owns how type hints become a schema. Invariant: an argument with a hint that JSON values don't have
(an enum, a date, a model) is converted before the call, or its function is refused.
"""

import functools
import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from transformers.utils.chat_template_utils import get_json_schema

from agent_vllm.errors import ToolDefinitionError

# `a (int, optional): text` in a docstring; the type is in the hints already.
_TYPED_ARGUMENT = re.compile(r"^(\s*)(\w+)\s*\((?:[^()\n]|\([^()\n]*\))*\)\s*:", re.MULTILINE)
_REFERENCE = "#/$defs/"
_JSON_TYPES = (str, int, float, bool, type(None), list, dict, tuple, Any)
_UNIONS = (Union, types.UnionType)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """Hold what hints and docstring say.

    Attributes:
        schema: as `transformers.utils.get_json_schema` gives it.
        converters: of the arguments that are no plain JSON, by name.
    """

    schema: dict[str, Any]
    converters: dict[str, TypeAdapter[Any]]


def signature_of(function: Callable[..., Any]) -> Signature:
    """Describe a function with type hints and a Google-style docstring.

    transformers describes arguments with JSON types, and pydantic all others.

    Raises:
        Exception: it can't be described; the parsers of hints and docstrings raise many kinds.
    """
    parameters = inspect.signature(function).parameters
    _check_kinds(parameters)
    hints = get_type_hints(function, include_extras=True)
    typed = {name: hint for name, hint in hints.items() if name in parameters}
    typed = {name: hint for name, hint in typed.items() if not _is_json(hint)}
    schema = get_json_schema(_stand_in(function, typed))
    _describe_typed(schema["function"]["parameters"], typed)
    for name, parameter in parameters.items():
        if parameter.default is None:  # `day: str = None` accepts None, whatever its hint says
            schema["function"]["parameters"]["properties"][name]["nullable"] = True
            typed |= {name: typed[name] | None} if name in typed else {}
    return Signature(schema=schema, converters={n: TypeAdapter(hint) for n, hint in typed.items()})


def converted(
    arguments: Mapping[str, Any], converters: Mapping[str, TypeAdapter[Any]]
) -> dict[str, Any]:
    """Return the arguments as the function's hints say.

    Raises:
        ValueError: one does not fit; says which and why.
    """
    values = dict(arguments)
    for name in values.keys() & converters.keys():
        try:
            values[name] = converters[name].validate_json(json.dumps(values[name]))
        except ValidationError as error:
            problems = (
                ".".join(map(str, (name, *e["loc"]))) + f": {e['msg']}" for e in error.errors()
            )
            raise ValueError("; ".join(problems)) from error
        except Exception as error:  # what a model's own validator raises
            raise ValueError(f"{name}: {type(error).__name__}: {error}") from error
    return values


def _check_kinds(parameters: Mapping[str, inspect.Parameter]) -> None:
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolDefinitionError(
                f"Argument `{name}` must be one that can be given by name, got `{parameter}` "
                f"({parameter.kind.description})."
            )


def _is_json(hint: Any) -> bool:
    """Return whether a JSON value is what the hint says, without conversion."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return all(isinstance(note, str) for note in args[1:]) and _is_json(args[0])
    if origin is Literal:
        return True  # transformers refuses values that JSON doesn't have
    if origin is dict:
        return args[0] in (str, Any) and _is_json(args[1])
    if origin is tuple and (... in args or len(args) == 1):
        return False
    if origin in (*_UNIONS, list, tuple):
        return all(map(_is_json, args))
    return hint in _JSON_TYPES


# ---- arguments that pydantic describes ----


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it only repeats the field's name


def _describe_typed(parameters: dict[str, Any], typed: Mapping[str, Any]) -> None:
    """Write the schemas of these arguments over what stands in their place."""
    adapters = [(name, "validation", _adapter(name, hint)) for name, hint in typed.items()]
    found, shared = TypeAdapter.json_schemas(adapters, schema_generator=_Untitled)  # type: ignore[arg-type]
    definitions = shared.get("$defs", {})
    schemas: dict[str, Any] = {name: schema for (name, _), schema in found.items()}
    try:
        schemas = _inlined(schemas, definitions)
    except RecursionError:  # a type that holds itself: only references can say that
        parameters["$defs"] = definitions
    for name, schema in schemas.items():
        if type(None) in get_args(typed[name]):
            schema = {**schema, "nullable": True}
        parameters["properties"][name] = schema | parameters["properties"][name]


def _adapter(name: str, hint: Any) -> TypeAdapter[Any]:
    """Return what describes the hint without its None, which `nullable` says."""
    if get_origin(hint) in _UNIONS:
        hint = Union[tuple(arg for arg in get_args(hint) if arg is not type(None))]  # noqa: UP007
    try:
        adapter = TypeAdapter(hint)
        adapter.json_schema()
    except PydanticUserError as error:
        raise ToolDefinitionError(
            f"Argument `{name}` must have a type that JSON can say, got {hint}. Use JSON types, an "
            "enum, a dataclass or a pydantic model."
        ) from error
    return adapter


def _inlined(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...] = ()) -> Any:
    """Write definitions in place of references, which chat templates don't follow."""
    if isinstance(schema, list):
        return [_inlined(item, definitions, within) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return {key: _inlined(value, definitions, within) for key, value in schema.items()}
    name = reference.removeprefix(_REFERENCE)
    if name in within:
        raise RecursionError(name)
    beside = {key: value for key, value in schema.items() if key != "$ref"}
    return {**_inlined(definitions[name], definitions, (*within, name)), **beside}


# ---- what transformers reads ----


def _stand_in(function: Callable[..., Any], typed: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function, or a stand-in without types in its docstring and without `typed` hints.

    Google's style allows `a (int): text`; transformers reads `a: text` alone.
    """
    parameters = inspect.signature(function).parameters
    docstring = inspect.getdoc(function) or ""

    def untyped(match: re.Match[str]) -> str:
        return f"{match[1]}{match[2]}:" if match[2] in parameters else match[0]

    plain = _TYPED_ARGUMENT.sub(untyped, docstring)
    if plain == docstring and not typed:
        return function

    @functools.wraps(function)
    def stand_in() -> None: ...

    stand_in.__doc__ = plain
    stand_in.__annotations__ = {**function.__annotations__, **dict.fromkeys(typed, Any)}
    return stand_in
