"""The JSON Schema of a study file, for editors: generated from the dataclasses that read it.

Keys, types, choices, defaults and descriptions are those of the dataclasses and of the docstrings under their fields.
Rules that tie settings together are not in it: the study's own reader has them. What YAML 1.2 takes for text where YAML
1.1 has numbers (640_000) passes as a number.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union

from spes_core.config import RunConfig, to_dict
from workbench.compose import NAME
from workbench.groups import group_names, group_options
from workbench.metrics import METRICS
from workbench.settings import PrimaryMetric, ReportSettings, Resources
from workbench.spec import ArmKeys, StudyKeys
from workbench.sweep import SweepKeys
from workbench.trees import leaves

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_INTEGER: Schema = {"type": ["integer", "string"], "pattern": r"^[+-]?[0-9][0-9_]*$"}
_NUMBER: Schema = {"type": ["number", "string"], "pattern": r"^[+-]?[0-9_.]+([eE][+-]?[0-9]+)?$"}
_DEFAULTS = 'Config groups to start from, such as "model/tiny"; the file itself comes after them.'


def study_schema() -> Schema:
    """The schema of a study file."""
    definitions: dict[str, Schema] = {}
    root = _definition(StudyKeys, definitions)
    choices = [f"{group}/{option}" for group in group_names() if group != "method" for option in group_options(group)]
    pairs = [{"type": "object", "minProperties": 1, "maxProperties": 1}, {"enum": [*choices, "_self_"]}]
    root["properties"]["defaults"] = {"description": _DEFAULTS, "type": "array", "items": {"anyOf": pairs}}
    root["properties"]["arms"] |= {
        "minProperties": 1,
        "propertyNames": {"pattern": f"^{NAME.pattern}$", "maxLength": 80},
        "additionalProperties": _reference(ArmKeys, definitions),
    }
    root["properties"]["name"] |= {"pattern": f"^{NAME.pattern}$", "maxLength": 80}
    root["properties"]["seeds"] |= {"minItems": 1, "uniqueItems": True}
    root["patternProperties"] = _dotted(StudyKeys, definitions)
    return {"$schema": DIALECT, "title": "Study of the SPES workbench", **root, "$defs": definitions}


def setting_paths() -> list[str]:
    """Every setting of a run that a study may name, and every group of them; seeds belong to the study."""
    found = [path for path, _ in leaves(to_dict(RunConfig())) if path != "seed"]
    return [*found, *dict.fromkeys(path.split(".")[0] for path in found if "." in path)]


@cache
def field_docs(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, those of its bases too."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for node, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _is_text(below):
                docs[node.target.id] = " ".join(ast.literal_eval(below.value).split())
    return docs


def _is_text(node: ast.stmt) -> typing.TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _definition(kind: type, definitions: dict[str, Schema]) -> Schema:
    """A mapping with the fields of a dataclass as its keys and no others."""
    hints = typing.get_type_hints(kind)
    own = [item for item in fields(kind) if not (issubclass(kind, RunConfig) and item.name == "seed")]
    properties = {item.name: _property(kind, item, hints[item.name], definitions) for item in own}
    required = [item.name for item in own if item.default is MISSING and item.default_factory is MISSING]
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if issubclass(kind, RunConfig):
        schema["patternProperties"] = _dotted(kind, definitions)
    return schema | ({"required": required} if required else {})


def _property(kind: type, item: Field[Any], hint: Any, definitions: dict[str, Schema]) -> Schema:
    schema = _special(kind, item.name) or _type(hint, definitions)
    doc = field_docs(kind).get(item.name) or _first_line(hint)
    schema = {"description": doc, **schema} if doc else dict(schema)
    default = item.default
    if default is not MISSING:
        schema["default"] = list(default) if isinstance(default, tuple) else default
    return schema


def _first_line(hint: Any) -> str:
    """What a group of settings is, from the docstring of its dataclass."""
    kind = next((option for option in (hint, *typing.get_args(hint)) if is_dataclass(option)), None)
    return (inspect.getdoc(kind) or "").split("\n")[0] if kind is not None else ""


def _special(kind: type, name: str) -> Schema | None:
    """Values that are texts or mappings to the reader, and choices to whoever writes them."""
    paths: Schema = {"enum": setting_paths()}
    special: dict[tuple[type, str], Schema] = {
        (StudyKeys, "equal"): {"type": "array", "items": paths},
        (ReportSettings, "x"): {"enum": [*setting_paths(), None]},
        (PrimaryMetric, "name"): {"enum": list(METRICS)},
        (Resources, "timeout"): {"type": ["string", "number"]},
        (SweepKeys, "grid"): _axes(),
        (SweepKeys, "zip"): _axes(),
    }
    return special.get((kind, name))


def _axes() -> Schema:
    """Lists of values by dotted or nested path of a setting; null takes an axis away. The reader checks the values."""
    values: Schema = {"type": ["array", "null"], "minItems": 1}
    groups: dict[str, Schema] = {}
    for path in setting_paths():
        group, _, leaf = path.partition(".")
        if leaf:
            groups.setdefault(group, {})[leaf] = values
    nested = {
        group: {"anyOf": [values, {"type": "object", "properties": axes, "additionalProperties": False}]}
        for group, axes in groups.items()
    }
    flat = {path: values for path in setting_paths() if path not in groups and path != "method"}
    return {"type": "object", "properties": {**flat, **nested}, "additionalProperties": False}


def _type(hint: Any, definitions: dict[str, Schema]) -> Schema:
    """The schema of a type that `spes_core.structure` reads."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return _reference(hint, definitions)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        options = [_type(option, definitions) for option in arguments if option is not type(None)]
        return {"anyOf": [*options, {"type": "null"}] if type(None) in arguments else options}
    if origin is tuple:
        return {"type": "array", "items": _type(arguments[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(arguments[1], definitions)}
    plain = {bool: {"type": "boolean"}, str: {"type": "string"}, int: _INTEGER, float: _NUMBER}
    return dict(plain.get(hint, {}))


def _reference(kind: type, definitions: dict[str, Schema]) -> Schema:
    name = kind.__name__.strip("_")
    if name not in definitions:
        definitions[name] = {}  # its place, so that the order is that of first use
        definitions[name].update(_definition(kind, definitions))
    return {"$ref": f"#/$defs/{name}"}


def _dotted(kind: type, definitions: dict[str, Schema]) -> dict[str, Schema]:
    """Settings below a mapping by dotted path ("optim.lr"), as patterns: editors do not offer each as a key."""
    found: dict[str, Schema] = {}
    hints = typing.get_type_hints(kind)
    for item in fields(kind):
        inner = hints[item.name]
        if not is_dataclass(inner):
            continue
        assert isinstance(inner, type)
        definition = _reference(inner, definitions)["$ref"].rpartition("/")[2]
        for name in (below.name for below in fields(inner) if below.name in definitions[definition]["properties"]):
            found[f"^{item.name}\\.{name}$"] = {"$ref": f"#/$defs/{definition}/properties/{name}"}
        for pattern, schema in _dotted(inner, definitions).items():
            found[f"^{item.name}\\.{pattern.removeprefix('^')}"] = schema
    return found
