"""Check a call's arguments against its tool's schema.

Invariant: a schema that passed `schema_problem` is resolved without asking anything outside of it,
and checking arguments returns errors, whatever the check itself raises.
"""

import functools
import json
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import jsonschema
import referencing
import referencing.exceptions
from jsonschema.validators import extend
from referencing.jsonschema import DRAFT202012

_NOTHING_REMOTE = referencing.Registry()  # without it, jsonschema fetches remote references
_DRAFT = jsonschema.Draft202012Validator


def validator_of(parameters: Mapping[str, Any]) -> Any:
    """Return a validator for a schema that has no problem."""
    return _Validator(parameters, registry=_NOTHING_REMOTE)


def argument_errors(validator: Any, arguments: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the arguments, in the schema's terms; empty if they fit.

    NaN and infinite numbers are refused, since JSON has none.
    """
    try:
        if errors := list(_non_finite(arguments, "")):
            return errors
        return [
            f"{'.'.join(map(str, error.absolute_path)) or 'arguments'}: {error.message}"
            for error in validator.iter_errors(arguments)
        ]
    except RecursionError:
        return ["arguments: nested too deeply"]
    except Exception as error:  # numbers beyond a float, patterns that Python can't compile, ...
        return [f"arguments: they can't be checked ({type(error).__name__}: {error})"]


@functools.lru_cache(maxsize=4096)  # environments build the same tools over and over
def schema_problem(schema_text: str) -> str | None:
    """Return why these parameters, as JSON text, are no usable JSON schema, or None."""
    schema = json.loads(schema_text)
    try:
        _DRAFT.check_schema(schema)
    except jsonschema.SchemaError as error:
        return f"are no JSON schema: {error.message}"
    resource = DRAFT202012.create_resource(schema)
    for reference in _unresolvable(resource, _NOTHING_REMOTE.resolver_with_root(resource)):
        return (
            f"refer to {reference!r}, which is not in them. Write it out, or put it under `$defs`"
        )
    return None


def _unresolvable(resource: Any, resolver: Any) -> Iterator[str]:
    if isinstance(resource.contents, Mapping):
        for keyword in ("$ref", "$dynamicRef"):
            reference = resource.contents.get(keyword)
            if reference is None:
                continue
            try:
                resolver.lookup(reference)
            except referencing.exceptions.Unresolvable:
                yield reference
    for part in resource.subresources():
        yield from _unresolvable(part, resolver.in_subresource(part))


def _non_finite(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path or 'arguments'}: {value} is not a JSON number"
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        yield from _non_finite(item, f"{path}.{key}" if path else str(key))


# ---- JSON schema as people write it ----


def _or_null(check: Any) -> Any:
    """Let null pass where OpenAPI's `nullable` or a default of null says so.

    transformers writes `nullable` for `Optional` arguments; JSON schema does not know the word.
    """

    def keyword(validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]) -> Any:
        if instance is None and (
            schema.get("nullable") is True or schema.get("default", ...) is None
        ):
            return ()
        return check(validator, value, instance, schema)

    return keyword


def _multiple_of(validator: Any, factor: Any, instance: Any, _: Mapping[str, Any]) -> Any:
    """Compare decimal numbers as they are written: 19.99 is a multiple of 0.01."""
    if validator.is_type(instance, "number") and (_exact(instance) / _exact(factor)) % 1:
        yield jsonschema.ValidationError(f"{instance!r} is not a multiple of {factor!r}")


def _exact(number: Any) -> Fraction:
    return Fraction(number if isinstance(number, int) else repr(number))


_Validator: Any = extend(
    _DRAFT,
    {
        name: _or_null(check)
        for name, check in ({**_DRAFT.VALIDATORS, "multipleOf": _multiple_of}).items()
    },
)
