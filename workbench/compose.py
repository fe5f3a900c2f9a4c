"""A study file, its Hydra config groups and the command line's overrides, composed into one tree.

Order of precedence, lowest first: groups named in ``defaults``, what the file extends, the file itself, overrides;
and under each arm the group ``method/<its method>``, the arm's own keys, overrides. Each value's origin stays known, so
that a mistake found later is reported where it was made.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from workbench.errors import StudyError
from workbench.groups import CONF, group_line, group_names, group_options, header_package, wrong_choice
from workbench.studyfile import StudyFile, read_study_file
from workbench.trees import Tree, covers, lookup, nested
from workbench.yamlsource import Source

_PRIMARY = "workbench_study"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]*")
"""What a study or an arm can be called: it becomes part of folder names."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """The composed study as plain data, and where each part of it comes from."""

    tree: Tree
    source: StudyFile
    overrides: tuple[Override, ...]
    groups: Mapping[str, str]
    """Group choices by the path that the group's settings land under: {"run.model": "model/tiny"}."""
    mistakes: tuple[str, ...] = ()
    """What is wrong so far; the parts concerned are left out of the tree, so that reading can find the rest."""
    broken: tuple[str, ...] = ()
    """The paths that mistakes concern, as far as they can be told."""

    def place(self, path: str) -> str:
        """Where a setting was written, or the nearest one around it: "file:line" or "override key=value"."""
        while path:
            if found := self.written(path):
                return found
            if found := self.source.first_below(path):
                return found
            path = path.rpartition("[" if path.endswith("]") else ".")[0]
        return self.source.path

    def written(self, path: str) -> str | None:
        """Where exactly this setting was written; None when its value is a default."""
        for override in reversed(self.overrides):
            key = override.key_or_group
            below = covers(path, key) and path not in self.source.places
            if key == path or below or (covers(key, path) and _has(override.value(), path[len(key) + 1 :])):
                return f"override {override.input_line}"
        if place := self.source.where(path):
            return place
        for package, choice in self.groups.items():
            if covers(package, path) and (line := group_line(choice, path[len(package) + 1 :])):
                return line
        return None


def compose_study(path: Path, overrides: Sequence[str], is_null_a_value: Callable[[str], bool]) -> Composition:
    """Compose the study at ``path``; ``is_null_a_value``: see `studyfile.read_study_file`.

    Raises StudyError when there is nothing to compose: no readable file, or an override that Hydra cannot apply.
    """
    source = read_study_file(path, is_null_a_value)
    mistakes, broken = list(source.mistakes), list(source.broken)
    parsed = _parse(overrides, mistakes, broken)
    defaults = _all_defaults(source, mistakes, broken)
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base=None, config_dir=str(CONF)):
        texts = [_for_hydra(override, [group for group, _ in defaults]) for override in parsed]
        kinds = _launcher_kinds(parsed)
        # The first pass finds the arms and their methods; the second puts each method's group under its arm.
        tree, _ = _compose(source, defaults, [*kinds, *texts], mistakes)
        draft = Composition(tree=tree, source=source, overrides=parsed, groups={})
        methods = _methods(draft, mistakes)
        arms = [(f"method@arms.{arm}", method) for arm, method in methods.items()]
        # "+key" has been checked by the first pass; what it adds may now be in a method's group.
        texts = [f"+{text}" if _adds_setting(override) else text for text, override in zip(texts, parsed, strict=True)]
        tree, choices = _compose(source, [*defaults, *arms], [*kinds, *texts], mistakes)
    GlobalHydra.instance().clear()
    for name in _arms_of(tree).keys() - methods.keys():
        _arms_of(tree)[name].pop("method", None)  # it has been refused; the typed reader need not do so again
        broken.append(f"arms.{name}.method")
    return Composition(
        tree=tree,
        source=source,
        overrides=parsed,
        groups=_packages(choices),
        mistakes=tuple(mistakes),
        broken=tuple(broken),
    )


def _parse(texts: Sequence[str], mistakes: list[str], broken: list[str]) -> tuple[Override, ...]:
    """The overrides that can be applied, in order."""
    parsed = []
    for text in texts:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            mistakes.append(f"override {text}: is not of the form key=value, +key=value or ~key: {_reason(error)}")
            broken.append(text.lstrip("+~").split("=")[0])
            continue
        if wrong := _wrong_override(override):
            mistakes.append(f"override {text}: {wrong}")
            broken.append(_package(override.key_or_group))
        else:
            parsed.append(override)
    return tuple(parsed)


def _wrong_override(override: Override) -> str | None:
    key = override.key_or_group
    if override.is_sweep_override():
        return f"to sweep over values, write sweep.grid.{key.removeprefix('run.')}=[value,value]"
    if key == "extends":
        return "what a study extends is read from its file alone"
    if key == "method":
        return "each arm has its own method; write arms.NAME.method=... or run.method=..."
    if key in group_names() and not override.is_delete():
        return wrong_choice(key, override.value())
    return None


def _for_hydra(override: Override, listed: Iterable[str]) -> str:
    """The override in the spelling that lets Hydra set what no file mentions; unknown names are refused later."""
    text, key = str(override.input_line), override.key_or_group
    if override.is_delete() or override.is_add() or override.is_force_add():
        return text
    if key in group_names():
        return text if key in listed else f"+{text}"
    return f"++{text}"


def _launcher_kinds(overrides: Iterable[Override]) -> list[str]:
    """`launcher=ssh` also where the study file itself names another kind: a group alone would come below the file."""
    chosen = [override for override in overrides if override.key_or_group == "launcher" and not override.is_delete()]
    return [f"++launcher.kind={override.value()}" for override in chosen]


def _adds_setting(override: Override) -> bool:
    return bool(override.is_add()) and override.key_or_group not in group_names()


def _package(group: str) -> str:
    """Where the settings of a group go, to which a choice was refused; another key is its own place."""
    close = difflib.get_close_matches(group, group_names(), n=1)
    return header_package(close[0], group_options(close[0])[0]) if close else group or "run"


def _all_defaults(study: StudyFile, mistakes: list[str], broken: list[str]) -> list[tuple[str, str]]:
    """The groups that the study's files choose: a choice replaces that of the same group in a file below."""
    pairs: dict[str, str] = {}
    for index, source in enumerate(study.sources):
        if index and "defaults" in source.data and source.data["defaults"] is None:
            pairs = {}
        else:
            pairs |= _defaults(source, mistakes, broken)
    return list(pairs.items())


def _defaults(source: Source, mistakes: list[str], broken: list[str]) -> list[tuple[str, str]]:
    """(group, option) of each usable entry of the file's defaults list: "model/tiny" or {model: tiny}."""
    entries = source.data.get("defaults", [])
    if not isinstance(entries, list):
        mistakes.append(f"{source.path}:{source.lines['defaults']}: defaults must be a list such as [model/tiny]")
        broken.append("defaults")
        return []
    pairs: dict[str, str] = {}
    for index, entry in enumerate(entries):
        if entry == "_self_" and index == len(entries) - 1:
            continue  # Hydra's word for the file itself: here it always comes after its groups
        if isinstance(entry, dict) and len(entry) == 1:
            entry = "/".join(str(part) for part in next(iter(entry.items())))
        group, slash, option = entry.rpartition("/") if isinstance(entry, str) else ("", "", "")
        if not slash:
            wrong: str | None = f"must be of the form group/name; groups: {', '.join(group_names())}"
        elif group == "method":
            wrong = f"cannot be shared: each arm has its own method; write arms: {{NAME: {{method: {option}}}}}"
        elif group in pairs:
            wrong = f"chooses from {group} a second time; keep one"
        else:
            wrong = wrong_choice(group, option)
        if wrong:
            mistakes.append(f"{source.path}:{source.lines[f'defaults[{index}]']}: defaults[{index}] ({entry}) {wrong}")
            broken.append(_package(group))
        else:
            pairs[group] = option
    return list(pairs.items())


def _methods(draft: Composition, mistakes: list[str]) -> dict[str, str]:
    """The method of each arm that has one; what is no arm at all is left for the typed reader to refuse."""
    shared = lookup(draft.tree, "run.method")
    methods: dict[str, str] = {}
    for name, arm in _arms_of(draft.tree).items():
        method = arm.get("method", shared)
        if method is None:
            wrong: str | None = f"is missing; valid names: {', '.join(group_options('method'))}"
        elif wrong := wrong_choice("method", method):
            wrong = f"({method}) {wrong}"
        else:
            methods[name] = method
        if wrong:
            own = draft.written(f"arms.{name}.method")
            place = own or draft.written("run.method") or draft.place(f"arms.{name}")
            mistakes.append(f"{place}: arms.{name}.method {wrong}")
    return methods


def _arms_of(tree: Tree) -> dict[str, Tree]:
    """What under arms can be an arm."""
    arms = tree.get("arms")
    items = arms.items() if isinstance(arms, dict) else ()
    return {name: arm for name, arm in items if isinstance(arm, dict) and NAME.fullmatch(name)}


def _compose(
    source: StudyFile, defaults: list[tuple[str, str]], overrides: list[str], mistakes: list[str]
) -> tuple[Tree, dict[str, str]]:
    """One pass of Hydra: the composed plain tree and the group choices that it made."""
    listed = [{group: option} for group, option in defaults]
    ConfigStore.instance().store(name=_PRIMARY, node={**source.document, "defaults": [*listed, "_self_"]})
    try:
        composed = compose(_PRIMARY, overrides=overrides, return_hydra_config=True)
        choices = {str(key): str(value) for key, value in composed.hydra.runtime.choices.items()}
        OmegaConf.set_struct(composed, False)
        composed.pop("hydra")
        tree = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise StudyError([*mistakes, _composition_mistake(source, overrides, error)]) from error
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}, choices


def _composition_mistake(source: StudyFile, overrides: list[str], error: Exception) -> str:
    blamed = [text for text in overrides if text.lstrip("+~").split("=")[0] in str(error)]
    place = f"override {blamed[0].removeprefix('++')}" if blamed else source.path
    return f"{place}: {_reason(error)}"


def _packages(choices: dict[str, str]) -> dict[str, str]:
    """{"run.model": "model/tiny", "arms.spes": "method/spes"} from Hydra's choices, method groups last."""
    packages = {}
    for key, option in choices.items():
        group, _, package = key.partition("@")
        if group in group_names() and option != "None":
            packages[package or header_package(group, option)] = f"{group}/{option}"
    return packages


def _has(value: Any, path: str) -> bool:
    missing = object()
    return isinstance(value, dict) and lookup(nested(value), path, missing) is not missing


def _reason(error: BaseException) -> str:
    """The first line of a Hydra error's cause, which says more than the error itself."""
    return str(error.__cause__ or error).strip().split("\n", 1)[0]
