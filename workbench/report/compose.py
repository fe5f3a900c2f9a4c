"""Puts a study's report together: which sentences, figures and tables stand where. Pure: evidence in, document out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workbench.report import (
    bandwidth,
    checks,
    curves,
    domains,
    figures,
    forest,
    grid,
    literature,
    load,
    observations,
    origins,
    resources,
    scaling,
    scores,
    search,
    similarity,
    sources,
    tables,
    wire,
    words,
)
from workbench.report.document import Block, Command, Document, Figure, KeyNumbers, Note, Paragraph, Section
from workbench.report.evidence import Evidence
from workbench.report.findings import analyse
from workbench.report.printing import count, join, sentence
from workbench.report.versions import SET_ASIDE, one_version_a_cell

FORMATS = ("html", "pdf", "csv", "latex")


def compose(evidence: Evidence, report_dir: Path) -> Document:
    """The report of a study; parts without data are left out, and what is missing is said."""
    evidence = one_version_a_cell(evidence)
    whole, found = evidence, search.read(evidence)
    if found is not None:
        evidence = search.without_losers(evidence, found)
    analysis = analyse(evidence)
    numbers = words.key_numbers(analysis)
    against_x, against_bytes = figures.loss_figure(analysis), wire.pareto_figure(analysis)
    over_two, differences = grid.grid_figure(analysis), forest.forest_figure(analysis)
    time_of_round = bandwidth.bandwidth_figure(analysis)
    leading = (
        time_of_round,
        against_bytes if evidence.leads_with_bytes else None,
        over_two,
        differences if not evidence.x_values else None,
        against_x,
    )
    hero = next((figure for figure in leading if figure is not None), None)

    def unless_hero(figure: Figure | None) -> Figure | None:
        return None if figure is hero else figure

    opening: list[Block | None] = [
        KeyNumbers(numbers=numbers) if numbers else None,
        *_warnings(whole),
        hero,
        _sentence(observations.setup(evidence)),
        Command(text=str(evidence.study.get("command", "")), label="Reproduce with") if _command(evidence) else None,
    ]
    sections = [
        _section(
            "result",
            "Result",
            _sentence(observations.result(analysis)),
            unless_hero(against_x),
            tables.summary_table(analysis),
            unless_hero(over_two),
            unless_hero(differences),
            tables.differences_table(analysis),
        ),
        search.section(whole, found) if found is not None else None,
        _section(
            "communication",
            "Communication",
            _sentence(observations.communication(analysis)),
            _sentence(scaling.sentence(analysis)),
            scaling.scaling_figure(analysis),
            wire.bytes_figure(analysis),
            unless_hero(against_bytes),
            unless_hero(time_of_round),
            checks.prediction_bytes_table(evidence),
        ),
        _section("learning", "Learning curves", curves.curves_figure(analysis)),
        _section(
            "memory",
            "Memory",
            _sentence(observations.memory(analysis)),
            resources.memory_figure(analysis),
            checks.prediction_memory_table(evidence),
        ),
        _section(
            "throughput",
            "Throughput",
            _sentence(observations.throughput(analysis)),
            resources.throughput_figure(analysis),
        ),
        domains.section(analysis),
        scores.section(analysis),
        _section("load", "Expert load", load.load_figure(analysis)),
        _section("similarity", "Similarity of experts", similarity.similarity_figure(analysis)),
        _section("literature", "Beside the literature", literature.literature_table(analysis)),
        _section("comparability", "Comparability", checks.budget_table(evidence), checks.settings_table(evidence)),
        _section("trials", "Trials", tables.missing_table(whole), tables.trials_table(whole, report_dir)),
        _section("provenance", "Provenance", sources.provenance_table(whole), sources.sources_table(evidence)),
    ]
    return Document(
        name=str(evidence.study.get("name") or evidence.folder.name),
        title=str(evidence.study.get("question") or evidence.study.get("name") or evidence.folder.name),
        byline=_byline(whole),
        verdict=tuple(text for text in (sentence(bandwidth.finding(analysis)), *words.verdict(analysis)) if text),
        opening=tuple(block for block in opening if block is not None),
        sections=tuple(section for section in sections if section is not None),
        formats=tuple(str(name) for name in evidence.report.get("formats") or FORMATS),
    )


def _command(evidence: Evidence) -> bool:
    return bool(evidence.study.get("command"))


def _sentence(text: str) -> Paragraph | None:
    return Paragraph(text=text) if text else None


def _section(name: str, title: str, *blocks: Block | None) -> Section | None:
    kept = tuple(block for block in blocks if block is not None)
    return Section(id=name, title=title, blocks=kept) if kept else None


def _byline(evidence: Evidence) -> str:
    commits = origins.different(evidence, _short_commit)
    started = origins.started_at(evidence)
    parts = [
        f"{len(evidence.done)} of {count(len(evidence.trials), 'trial')} finished",
        count(len(evidence.seeds), "seed"),
        f"started {started[:10]}" if started else "",
        f"run by commit{'s' if len(commits) > 1 else ''} {join(commits)}" if commits else "",
    ]
    return " · ".join(part for part in parts if part)


def _short_commit(provenance: dict[str, Any]) -> str:
    commit = str(provenance.get("commit") or "")[:8]
    return f"{commit} with uncommitted changes" if commit and provenance.get("dirty") else commit


def _code_warnings(evidence: Evidence) -> Iterable[Note]:
    """Whether the trials were run by different code, or by other code than the study's present one."""
    codes, present = origins.codes(evidence), str(origins.present(evidence).get("code_digest") or "")
    if len(codes) > 1:
        text = (
            f"The trials were run by {len(codes)} different versions of the code, so differences between them may come"
            " from the code."
        )
    elif codes and present and present not in codes:
        text = "The trials were run by another version of the code than the present one, which wrote only the report."
    else:
        return
    items = [
        f"code {code[:12]}{' (the present one)' if code == present else ''}: {count(len(trials), 'trial')},"
        f" {join(sorted({trial.arm for trial in trials}))}"
        for code, trials in codes.items()
    ]
    items += [f"code {present[:12]} (the present one): no trial"] if present and present not in codes else []
    yield Note(text=text, items=tuple(items))


def _warnings(evidence: Evidence) -> Iterable[Note]:
    """What the reader must know before believing a number."""
    unfinished = [trial for trial in evidence.trials if not trial.done and trial.status != SET_ASIDE]
    if unfinished and evidence.done:
        kinds = [f"{sum(t.status == s for t in unfinished)} {s}" for s in dict.fromkeys(t.status for t in unfinished)]
        yield Note(
            text=f"{count(len(unfinished), 'trial')} of {len(evidence.trials)} gave no result ({join(kinds)}); the"
            " reasons are listed under *Trials*, and no mean contains them."
        )
    if aside := [trial for trial in evidence.trials if trial.status == SET_ASIDE]:
        yield Note(
            text=f"Set aside, because the other seeds of the same arm and settings were run by other code or data:"
            f" {count(len(aside), 'trial')} of {len(evidence.trials)}; they are listed under *Trials*, and no mean"
            " contains them."
        )
    yield from _code_warnings(evidence)
    if evidence.done and evidence.reference is None:
        yield Note(text="The study has no reference arm, so losses are reported but not compared with one.")
    if evidence.strays:
        yield Note(
            text=f"{count(len(evidence.strays), 'trial folder')} on disk no longer belong to the study and are not"
            " used."
        )
