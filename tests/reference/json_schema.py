"""The keywords of JSON Schema that the study's schema uses, checked one by one; any other keyword is an error."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from typing import Any

_KINDS = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == int(value),
}
_BOUNDS = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
_NOTES = {"$schema", "$defs", "title", "description", "default"}


def violations(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "") -> Iterator[str]:
    """What in a value breaks a schema, each with its path."""
    for keyword, rule in schema.items():
        if keyword not in _NOTES:
            yield from _broken(keyword, rule, value, schema, root, path)


def _broken(keyword: str, rule: Any, value: Any, schema: Any, root: Any, path: str) -> Iterator[str]:
    match keyword:
        case "$ref":
            target = root
            for part in rule.removeprefix("#/").split("/"):
                target = target[part]
            yield from violations(value, target, root, path)
        case "type":
            kinds = rule if isinstance(rule, list) else [rule]
            if not any(_KINDS[kind](value) for kind in kinds):
                yield f"{path}: ({value}) is no {kinds}"
        case "enum":
            if not any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in rule):
                yield f"{path}: ({value}) is none of {rule}"
        case "anyOf":
            if all(any(violations(value, option, root, path)) for option in rule):
                yield f"{path}: ({value}) fits no option"
        case "pattern":
            if isinstance(value, str) and not re.search(rule, value):
                yield f"{path}: ({value}) does not match {rule}"
        case "maxLength":
            if isinstance(value, str) and len(value) > rule:
                yield f"{path}: ({value}) is longer than {rule}"
        case "items":
            for index, item in enumerate(value if isinstance(value, list) else []):
                yield from violations(item, rule, root, f"{path}[{index}]")
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            if _KINDS["number"](value) and not _BOUNDS[keyword](value, rule):
                yield f"{path}: ({value}) breaks {keyword} {rule}"
        case "minItems":
            if isinstance(value, list) and len(value) < rule:
                yield f"{path}: has fewer than {rule} items"
        case "uniqueItems":
            if isinstance(value, list) and any(item in value[:index] for index, item in enumerate(value)):
                yield f"{path}: repeats an item"
        case _ if isinstance(value, dict):
            yield from _broken_mapping(keyword, rule, value, schema, root, path)
        case _:
            assert keyword in _MAPPING, f"{keyword} is not checked here"


_MAPPING = ("properties", "patternProperties", "additionalProperties", "required", "propertyNames", "minProperties",
            "maxProperties")  # fmt: skip


def _broken_mapping(keyword: str, rule: Any, value: Any, schema: Any, root: Any, path: str) -> Iterator[str]:
    match keyword:
        case "properties":
            for key in value.keys() & rule.keys():
                yield from violations(value[key], rule[key], root, f"{path}.{key}")
        case "patternProperties":
            for pattern, inner in rule.items():
                for key in value:
                    if re.search(pattern, key):
                        yield from violations(value[key], inner, root, f"{path}.{key}")
        case "additionalProperties":
            patterns = schema.get("patternProperties", {})
            for key in value.keys() - schema.get("properties", {}).keys():
                if any(re.search(pattern, key) for pattern in patterns):
                    continue
                if rule is False:
                    yield f"{path}: has no setting {key}"
                else:
                    yield from violations(value[key], rule, root, f"{path}.{key}")
        case "required":
            yield from (f"{path}: lacks {key}" for key in rule if key not in value)
        case "propertyNames":
            for key in value:
                yield from violations(key, rule, root, f"{path}.{key}")
        case "minProperties":
            if len(value) < rule:
                yield f"{path}: has fewer than {rule} keys"
        case "maxProperties":
            if len(value) > rule:
                yield f"{path}: has more than {rule} keys"
        case _:
            raise AssertionError(f"{keyword} is not checked here")
