"""Say what values a JSON schema allows: their JSON types, and one example.

Invariant: whatever the schema holds, references to itself included, both end and neither raises.
"""

from collections.abc import Mapping
from typing import Any

import referencing
import referencing.exceptions
from referencing.jsonschema import DRAFT202012

ANY_TYPE = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
_MAX_DEPTH = 4  # of schemas within schemas
_MAX_OPTIONAL_DEPTH = 3  # of the example's arguments that are not required
_EXAMPLES: dict[str, Any] = {  # in order of preference
    "string": "Oslo",
    "number": 2.5,
    "integer": 3,
    "boolean": True,
}


def allowed_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types of the values that a schema allows, as far as its keywords say.

    Args:
        schema: a part of `root`.
        root: the whole schema, in which references are looked up.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ANY_TYPE
    found = ANY_TYPE
    if "type" in schema:
        found &= _named(schema["type"])
    if "const" in schema:
        found &= {type_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        found &= frozenset(map(type_of, schema["enum"]))
    for part in (_referred(schema, root), *_list(schema, "allOf")):
        found &= allowed_types(part, root, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        if parts := _list(schema, keyword):
            found &= frozenset().union(*(allowed_types(p, root, depth + 1) for p in parts))
    return found | {"null"} if schema.get("nullable") is True else found


def type_of(value: Any) -> str:
    """Return the JSON type of a value; a whole number is an integer."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return {str: "string", list: "array"}.get(type(value), "object")


def example_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return an example value for each argument that a tool's parameters name.

    An example has an allowed type; bounds and patterns are not looked at.
    """
    example = _example(parameters, parameters, 0)
    return example if isinstance(example, dict) else {}


def _example(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(schema, Mapping):
        return _EXAMPLES["string"]
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][0]
    if depth <= _MAX_DEPTH and (part := _first_part(schema, root)) is not None:
        return _example(part, root, depth + 1)
    allowed = allowed_types(schema, root)
    parts = [schema, *_list(schema, "allOf")]
    if "object" in allowed and any("properties" in _resolved(part, root) for part in parts):
        return _example_object(parts, root, depth)
    simple = next((kind for kind in _EXAMPLES if kind in allowed), None)
    if simple is not None:
        return _EXAMPLES[simple]
    if "array" in allowed:
        is_deep = depth >= _MAX_DEPTH or "items" not in schema
        return [] if is_deep else [_example(schema["items"], root, depth + 1)]
    return {} if "object" in allowed else None


def _first_part(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schema with its reference followed, or its first choice taken; None without."""
    for keyword in ("$ref", "anyOf", "oneOf"):
        parts = [_referred(schema, root)] if keyword == "$ref" else _list(schema, keyword)
        rest = {key: value for key, value in schema.items() if key != keyword}
        for part in parts:
            if isinstance(part, Mapping) and allowed_types(part, root) != {"null"}:
                return {**rest, **part}
    return None


def _example_object(parts: list[Any], root: Mapping[str, Any], depth: int) -> dict[str, Any]:
    if depth > _MAX_DEPTH:
        return {}
    return {
        name: _example(schema, root, depth + 1)
        for part in (_resolved(part, root) for part in parts)
        for name, schema in _mapping(part, "properties").items()
        if depth < _MAX_OPTIONAL_DEPTH or name in _list(part, "required")
    }


def _resolved(part: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a part refers to, or the part itself."""
    found = _referred(part, root) if isinstance(part, Mapping) else None
    found = part if found is None else found
    return found if isinstance(found, Mapping) else {}


def _referred(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return what `$ref` names, or None."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return None
    registry = referencing.Registry()  # nothing outside of the schema
    try:
        resolver = registry.resolver_with_root(DRAFT202012.create_resource(dict(root)))
        return resolver.lookup(reference).contents
    except referencing.exceptions.Unresolvable:
        return None


def _named(kind: Any) -> frozenset[str]:
    kinds = frozenset(kind if isinstance(kind, list) else [kind]) & ANY_TYPE
    return kinds | {"integer"} if "number" in kinds else kinds


def _list(schema: Any, keyword: str) -> list[Any]:
    value = schema.get(keyword) if isinstance(schema, Mapping) else None
    return value if isinstance(value, list) else []


def _mapping(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, Mapping) else {}
