"""`python -m workbench.hosts`: an example of an inventory of hosts, and what is wrong with one and its hosts."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spes_core.errors import Problem
from workbench.errors import StudyError
from workbench.launch.inventory import TEMPLATE, Inventory, PlacementError, read_inventory
from workbench.launch.preflight import Preflight, check
from workbench.launch.remote import Placement, RemoteLauncher
from workbench.launch.room import Room, rooms
from workbench.terminal import print_table

if TYPE_CHECKING:
    from workbench.corpora import PreparedCorpus
    from workbench.spec import Study
    from workbench.trials import Corpus, Variant

_COLUMNS = ["host", "address", "takes", "python", "cores", "memory GiB", "GPUs", "free GB", "clock s", "answer ms"]


def study_inventory(study: Study) -> Inventory:
    """The inventory that a study names: as seen from the file that names it; in an override, from here.

    Raises StudyError.
    """
    composition, path = study.composition, Path(study.launcher.inventory)
    if not any(override.key_or_group == "launcher.inventory" for override in composition.overrides):
        file, _ = composition.source.places.get("launcher.inventory", (composition.source.path, 0))
        path = Path(file).parent / path
    try:
        return read_inventory(path.expanduser())
    except StudyError as error:
        if path.is_file():
            raise
        message = f"{error}; python -m workbench.hosts template prints an example"
        raise StudyError([study.locate(Problem("launcher.inventory", message))]) from error


def placements(study: Study, variants: Iterable[Variant], inventory: Inventory) -> dict[str, Placement]:
    """Where each trial's processes run, by its label. Raises StudyError with all that have no room."""
    found, mistakes = {}, []
    for variant in variants:
        try:
            found[variant.label] = inventory.place(variant.config)
        except PlacementError as error:
            mistakes.append(study.locate(Problem("launcher.inventory", f"has no room for {variant.label}: {error}")))
    if mistakes:
        raise StudyError(mistakes)
    return found


def study_rooms(
    study: Study, variants: Iterable[Variant], placed: Mapping[str, Placement], texts: Mapping[Corpus, PreparedCorpus]
) -> dict[str, Room]:
    """What the trials of a study need on the disk of each host."""
    from workbench.trials import Corpus

    at_once = study.resources.parallel_trials
    prepared = {corpus: text.folder for corpus, text in texts.items()}
    runs = ((one.config, placed[one.label], prepared.get(Corpus.of(one.config.data))) for one in variants)
    return rooms(runs, 1 if at_once == "auto" else at_once)


class StudyHosts:
    """The hosts of a study: read at once, asked when they are first needed, left by `close`."""

    def __init__(self, study: Study, variants: Sequence[Variant], texts: Mapping[Corpus, PreparedCorpus]) -> None:
        """``texts`` are those that are prepared. Raises StudyError for an inventory that is wrong, or has no room."""
        self._inventory, self._port = study_inventory(study), study.launcher.port
        self._placed = placements(study, variants, self._inventory)
        self._rooms = study_rooms(study, variants, self._placed, texts)
        self._launcher: RemoteLauncher | None = None

    def ready(self) -> RemoteLauncher:
        """A launcher on the hosts, once nothing is wrong with them. Raises StudyError with all that is."""
        if self._launcher is None:
            inventory = self._inventory
            print(f"checking {len(inventory.hosts)} hosts of {inventory.path}", flush=True)
            found = check(inventory, port=self._port, placements=self._placed.values(), rooms=self._rooms)
            _print_notes(found)
            if found.problems:
                found.close()
                raise StudyError(found.problems)
            self._launcher = RemoteLauncher(found.sites, inventory.place, port=self._port, links=found.links)
        return self._launcher

    def close(self) -> None:
        """End all that was started on them."""
        if self._launcher is not None:
            self._launcher.close()


def describe(placed: dict[str, Placement]) -> list[str]:
    """For a plan: which host runs what, one line for all trials that are placed alike."""
    alike = Counter(placed.values())
    lines = []
    for placement, count in alike.items():
        nodes: dict[str, list[str]] = {}
        for number, host in enumerate(placement.nodes):
            nodes.setdefault(host, []).append(str(number))
        what = "ranks" if placement.is_group else "nodes"
        shown = [f"{what} {', '.join(numbers)} on {host}" for host, numbers in nodes.items()]
        lead = [] if placement.is_group else [_servers(placement)]
        lines.append(f"{count} trials: {'; '.join([*lead, *shown])}")
    return lines


def _servers(placement: Placement) -> str:
    if len(placement.servers) == 1:
        return f"server on {placement.servers[0]}"
    by_host = Counter(placement.servers)
    return "servers: " + ", ".join(f"{count} on {host}" for host, count in by_host.items())


def _print_notes(found: Preflight) -> None:
    for note in found.notes:
        print(f"note: {note}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0, 2 where something is wrong, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m workbench.hosts", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("template", help="print an example of an inventory")
    checking = commands.add_parser("check", help="read an inventory, ask its hosts, and list everything that is wrong")
    checking.add_argument("inventory", type=Path, help="the file, such as hosts.yaml")
    checking.add_argument(
        "--study", nargs="+", metavar=("FILE", "key=value"), help="a study whose trials must find room, too"
    )
    checking.add_argument("--port", type=int, default=0, help="where the server or rank 0 listens (default: any)")
    options = parser.parse_args(arguments)
    if options.command == "template":
        print(TEMPLATE, end="")
        return 0
    try:
        inventory = read_inventory(options.inventory)
        placed, needed, mistakes = ({}, None, []) if options.study is None else _placed(options.study, inventory)
        found = check(inventory, port=options.port, placements=placed.values(), rooms=needed)
    except StudyError as error:
        for mistake in error.mistakes:
            print(f"error: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    found.close()
    _show(found)
    _print_notes(found)
    problems = [*mistakes, *found.problems]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2 if problems else 0


def _placed(
    words: Sequence[str], inventory: Inventory
) -> tuple[dict[str, Placement], dict[str, Room] | None, list[str]]:
    """Where the trials of a study, given with its overrides, run, and what they need; and which have no room."""
    from workbench.spec import read_study
    from workbench.study import find_corpora
    from workbench.trials import expand

    study = read_study(Path(words[0]), words[1:])
    variants = expand(study)
    try:
        placed = placements(study, variants, inventory)
    except StudyError as error:
        return {}, None, list(error.mistakes)
    for line in describe(placed):
        print(line)
    return placed, study_rooms(study, variants, placed, find_corpora(study, variants)), []


def _show(found: Preflight) -> None:
    rows = []
    for one in found.checked:
        host, facts = one.host, one.facts
        python = one.arrived.python if one.arrived is not None else "-"
        known = [
            str(facts["cores"]), f"{facts['memory_gib']:g}", str(len(facts["gpus"])),
            f"{facts['free_bytes'] / 1e9:.0f}", f"{one.skew_s:+.2f}", f"{one.round_trip_s * 1e3:.0f}",
        ] if facts else ["-"] * 6  # fmt: skip
        rows.append([host.name, host.address, str(host.nodes), python, *known])
    print_table(f"{len(rows)} hosts", _COLUMNS, rows, ["takes", *_COLUMNS[4:]])


if __name__ == "__main__":
    sys.exit(main())
