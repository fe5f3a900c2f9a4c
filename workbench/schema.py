"""The JSON Schema of a study file, for editors: generated from the dataclasses that read it.

Keys, types, choices, defaults and descriptions are those of the dataclasses and of the docstrings under their fields,
and the range of a setting is that of the rules. Rules that tie settings together are not in it: the study's own reader
has them. What YAML 1.2 takes for text where YAML 1.1 has numbers (640_000) passes as a number.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union

from spes_core import rules
from spes_core.config import RunConfig, to_dict
from workbench.compose import NAME
from workbench.groups import group_names, group_options
from workbench.metrics import DOMAIN, METRICS, SCORE
from workbench.searchspace import CORPUS, Confirm, Constraint, Objective, Range, SearchKeys
from workbench.settings import Launcher, PrimaryMetric, ReportSettings, Resources
from workbench.slurm.settings import Slurm
from workbench.spec import ArmKeys, StudyKeys
from workbench.studyfile import OWN
from workbench.trees import leaves, lookup

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_INTEGER: Schema = {"type": ["integer", "string"], "pattern": r"^[+-]?[0-9][0-9_]*$"}
_NUMBER: Schema = {"type": ["number", "string"], "pattern": r"^[+-]?[0-9_.]+([eE][+-]?[0-9]+)?$"}
_DURATION: Schema = {"type": ["string", "number"], "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*(s|m|min|h|d)?\s*$"}
_RANGES: tuple[tuple[tuple[str, ...], Schema], ...] = (
    (rules.AT_LEAST_ONE, {"minimum": 1}),
    (rules.FRACTIONS, {"minimum": 0, "maximum": 1}),
    (rules.BELOW_ONE, {"minimum": 0, "exclusiveMaximum": 1}),
    (rules.POSITIVE, {"exclusiveMinimum": 0}),
    (rules.POSITIVE_OR_NULL, {"exclusiveMinimum": 0}),
    (rules.NOT_NEGATIVE, {"minimum": 0}),
)
_DEFAULTS = 'Config groups to start from, such as "model/tiny"; the file itself comes after them.'
_EXTENDS = "Study files to build on, by their paths as seen from this one: what stands here comes over them."


def study_schema() -> Schema:
    """The schema of a study file."""
    definitions: dict[str, Schema] = {}
    root = _definition(StudyKeys, definitions)
    choices = [f"{group}/{option}" for group in group_names() if group != "method" for option in group_options(group)]
    pairs = [{"type": "object", "minProperties": 1, "maxProperties": 1}, {"enum": [*choices, "_self_"]}]
    root["properties"]["defaults"] = {"description": _DEFAULTS, "type": "array", "items": {"anyOf": pairs}}
    names: Schema = {"type": "string", "pattern": "."}
    root["properties"]["extends"] = {
        "description": _EXTENDS,
        "anyOf": [names, {"type": "array", "items": names}],
    }
    _take_away(root)
    kinds = typing.get_args(typing.get_type_hints(Launcher)["kind"])
    root["properties"]["launcher"]["anyOf"].append({"description": "Short for its kind alone.", "enum": [*kinds]})
    root["properties"]["arms"] |= {
        "minProperties": 1,
        "propertyNames": {"pattern": f"^{NAME.pattern}$", "maxLength": 80},
        "additionalProperties": {"anyOf": [_reference(ArmKeys, definitions), {"type": "null"}]},
    }
    _add_ranges(root, definitions)
    _add_axes(definitions)
    root["properties"]["name"] |= {"pattern": f"^{NAME.pattern}$", "maxLength": 80}
    root["properties"]["seeds"] |= {"minItems": 1, "uniqueItems": True}
    root["patternProperties"] = _dotted(StudyKeys, definitions)
    return {"$schema": DIALECT, "title": "Study of the SPES workbench", **root, "$defs": definitions}


def _take_away(root: Schema) -> None:
    """In a study that extends another, null in place of a section takes it away, and only what is its own is needed."""
    needed = [key for key in root["required"] if key not in OWN]
    root["required"] = list(OWN)
    root["anyOf"] = [{"required": needed}, {"required": ["extends"]}]
    for section in root["properties"].values():
        if "$ref" in section:
            section["anyOf"] = [{"$ref": section.pop("$ref")}, {"type": "null"}]
        elif section.get("type") == "array":
            section["type"] = ["array", "null"]


def setting_paths() -> list[str]:
    """Every setting of a run that a study may name, and every group of them; seeds belong to the study."""
    tree = to_dict(RunConfig())
    found = [path for path, _ in leaves(tree) if path != "seed"]
    groups = {group: part for group, part in tree.items() if isinstance(part, dict)}
    found += [f"{group}.{name}" for group, part in groups.items() for name, value in part.items() if value == {}]
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
    named = ({"pattern": f"^{kind.pattern}$"} for kind in (SCORE, DOMAIN))
    metrics: Schema = {"anyOf": [{"enum": list(METRICS)}, *named]}
    special: dict[tuple[type, str], Schema] = {
        (StudyKeys, "equal"): {"type": "array", "items": paths},
        (ReportSettings, "x"): {"enum": [*setting_paths(), None]},
        (PrimaryMetric, "name"): metrics,
        (Resources, "timeout"): _DURATION,
        (Slurm, "time"): {"anyOf": [_DURATION, {"type": "null"}]},
        (Objective, "metric"): metrics,
        (Constraint, "metric"): metrics,
        (SearchKeys, "n_trials"): {**_INTEGER, "minimum": 1},
        (Confirm, "top"): {**_INTEGER, "minimum": 1},
        (Confirm, "seeds"): {"type": "array", "items": {**_INTEGER, "minimum": 0}, "uniqueItems": True},
    }
    return special.get((kind, name))


def _add_ranges(root: Schema, definitions: dict[str, Schema]) -> None:
    """The smallest and the largest value of each setting that has one, wherever it is defined."""
    for paths, bounds in _RANGES:
        for path in paths:
            group, _, leaf = path.rpartition(".")
            run = definitions["RunConfig"]["properties"]
            kinds = [definitions[run[group]["$ref"].rpartition("/")[2]]] if group else [definitions["RunConfig"]]
            for kind in [*kinds, *([definitions["ArmKeys"]] if not group else [])]:
                if leaf in kind["properties"]:
                    kind["properties"][leaf] |= bounds


def _add_axes(definitions: dict[str, Schema]) -> None:
    """What a sweep and a search vary: values of a setting are what the setting itself may be."""
    sweep, search = definitions["SweepKeys"]["properties"], definitions["SearchKeys"]["properties"]
    for kind in ("grid", "zip"):
        sweep[kind] |= _by_path(_swept, definitions, groups=True)
    rule = _by_path(_value, definitions, groups=True)
    sweep["exclude"]["items"] = {**rule, "minProperties": 1}
    search["space"] |= {**_by_path(_searched, definitions, groups=False), "minProperties": 1}
    objective: list[Schema] = [{"enum": list(METRICS)}, _reference(Objective, definitions)]
    search["objective"]["anyOf"] = [*objective, {"type": "array", "items": {"anyOf": objective}, "minItems": 1}]
    limits = ("tolerance", "at_most", "at_least")
    _reference(Constraint, definitions)
    properties = definitions.pop("Constraint")["properties"]
    properties["tolerance"] = {**properties["tolerance"], "minimum": 0}
    search["constraints"]["items"] = {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "metric": properties["metric"],
                    **{
                        limit: {**properties[limit], **({"anyOf": [_NUMBER]} if limit == given else {"type": "null"})}
                        for limit in limits
                    },
                },
                "required": ["metric", given],
                "additionalProperties": False,
            }
            for given in limits
        ]
    }


def _value(path: str, definitions: dict[str, Schema]) -> Schema:
    """What a setting, or a group of settings, may be."""
    group, dot, leaf = path.partition(".")
    run = definitions["RunConfig"]["properties"]
    if not dot:
        return {"$ref": f"#/$defs/RunConfig/properties/{path}"}
    return {"$ref": f"{run[group]['$ref']}/properties/{leaf}"}


def _swept(path: str, definitions: dict[str, Schema]) -> Schema:
    """A list of values; null takes an axis away."""
    return {"type": ["array", "null"], "minItems": 1, "items": _value(path, definitions)}


def _searched(path: str, definitions: dict[str, Schema]) -> Schema:
    """A list of different values, or a range where the setting is a number."""
    values = {"type": "array", "minItems": 1, "uniqueItems": True, "items": _value(path, definitions)}
    default = lookup(to_dict(RunConfig()), path)
    is_number = default is None or (isinstance(default, int | float) and not isinstance(default, bool))
    return {"anyOf": [values, _reference(Range, definitions)]} if is_number else values


def _by_path(
    kind: Callable[[str, dict[str, Schema]], Schema], definitions: dict[str, Schema], *, groups: bool
) -> Schema:
    """A mapping with settings as keys, dotted or nested, and what ``kind`` says of each; whole groups too if asked."""
    flat: dict[str, Schema] = {}
    nested: dict[str, dict[str, Schema]] = {}
    for path in setting_paths():
        group, dot, leaf = path.partition(".")
        # A search cannot propose another corpus: each corpus is a study of its own.
        if path == "method" or (not groups and path in CORPUS):
            continue
        if dot:
            nested.setdefault(group, {})[leaf] = kind(path, definitions)
        if dot or isinstance(lookup(to_dict(RunConfig()), path, {}), dict) is False:
            flat[path] = kind(path, definitions)
    inner: dict[str, Schema] = {}
    for group, below in nested.items():
        mapping = {"type": "object", "properties": below, "additionalProperties": False, "minProperties": 1}
        inner[group] = {"anyOf": [kind(group, definitions), mapping]} if groups else mapping
    return {"type": "object", "properties": {**flat, **inner}, "additionalProperties": False}


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
