"""Studies that extend another file: what counts, whose mistake it is, and that trials are those of one whole file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.reference.json_schema import violations
from workbench.errors import StudyError
from workbench.schema import study_schema
from workbench.spec import is_null_a_value, read_study
from workbench.store import StudyFolder
from workbench.trials import Trial, expand, identify

BASE = """\
schema: 1
name: base
question: What happens?
defaults: [model/tiny, data/default, launcher/local]
run:
  nodes: 4
  budget_tokens: 100_000
  optim: {clip_norm: 1.0}
  merge.num_neighbours: 2
arms:
  centralized: {method: centralized, role: reference}
  dilico: {method: dilico}
  spes:
    method: spes
    merge.alpha: 0.2
sweep:
  grid:
    sync.interval_steps: [5, 10]
    merge: {interval_steps: [10, 20]}
seeds: [0, 1]
"""
OWN = """\
name: own
question: And then?
extends: base.yaml
"""
CHANGES = """\
defaults: [model/small]
run: {nodes: 2, optim: {clip_norm: null}}
arms:
  dilico: null
  spes: {merge: {alpha: 0.3}, sweep: {grid: {sync.interval_steps: [2]}}}
sweep: {grid: {sync: {interval_steps: null}}}
seeds: [3]
"""
WHOLE = """\
schema: 1
name: own
question: And then?
defaults: [model/small, data/default, launcher/local]
run:
  nodes: 2
  budget_tokens: 100_000
  optim: {clip_norm: null}
  merge.num_neighbours: 2
arms:
  centralized: {method: centralized, role: reference}
  spes: {method: spes, merge.alpha: 0.3, sweep: {grid: {sync.interval_steps: [2]}}}
sweep: {grid: {merge: {interval_steps: [10, 20]}}}
seeds: [3]
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    return path


def mistakes(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(StudyError) as caught:
        expand(read_study(path, overrides))
    return [mistake.replace(f"{path.parent}/", "") for mistake in caught.value.mistakes]


def trials_of(path: Path, *overrides: str) -> list[Trial]:
    study = read_study(path, overrides)
    return identify(study, expand(study), lambda corpus: "d1")


def test_trials_are_those_of_the_study_written_out_in_full(own: Path) -> None:
    own.write_text(OWN + CHANGES)
    whole = own.with_name("whole.yaml")
    whole.write_text(WHOLE)
    plain = trials_of(own)
    assert [trial.arm for trial in plain] == ["centralized", "spes", "spes"]
    assert plain == trials_of(whole)
    overrides = ("run.nodes=4", "model=tiny", "+arms.local.method=local", "seeds=[7]")
    overridden = trials_of(own, *overrides)
    assert overridden == trials_of(whole, *overrides)
    assert {(trial.seed, trial.config.nodes) for trial in overridden if trial.arm == "spes"} == {(7, 4)}


def test_what_is_extended_may_extend_and_later_files_of_a_list_win(own: Path) -> None:
    (own.parent / "deep").mkdir()
    (own.parent / "deep" / "a.yaml").write_text("extends: ../base.yaml\nname: a\nrun: {nodes: 8, merge.alpha: 0.4}\n")
    (own.parent / "b.yaml").write_text("extends: base.yaml\nrun: {merge.alpha: 0.5}\ndefaults: [model/small]\n")
    own.write_text(OWN.replace("base.yaml", "[deep/a.yaml, b.yaml]"))
    study = read_study(own)
    run = study.composition.tree["run"]
    assert (run["nodes"], run["merge"]["alpha"], run["budget_tokens"]) == (8, 0.5, 100_000)
    assert study.composition.groups["run.model"] == "model/small"
    assert study.composition.place("run.nodes") == f"{own.parent}/deep/a.yaml:3"


def test_a_mistake_is_told_in_the_file_that_makes_it(own: Path) -> None:
    base = BASE.replace("nodes: 4", "nodes: four\n  nodes: 3").replace("model/tiny", "model/tinny")
    (own.parent / "base.yaml").write_text(base.replace("role: reference", "rle: reference"))
    own.write_text(OWN + "run:\n  budgt_tokens: 5\nseeds: [1, 1]\nnmae: x\nseeds: [2]\n")
    found = mistakes(own)
    assert [line.split(": ")[0] for line in found] == [
        "base.yaml:4", "base.yaml:7", "base.yaml:12", "own.yaml:5", "own.yaml:7", "own.yaml:8",
    ]  # fmt: skip
    for part, line in zip(
        ('"tiny"', "first on line 6", '"role"', '"budget_tokens"', '"name"', "twice"), found, strict=True
    ):
        assert part in line


def test_a_broken_rule_is_told_where_the_last_word_was_said(own: Path) -> None:
    own.write_text(OWN + "run:\n  nodes: 4\n  merge: {num_neighbours: 99}\n")
    assert all(line.startswith("own.yaml:6: run.merge.num_neighbours (99)") for line in mistakes(own))
    own.write_text(OWN)
    (own.parent / "base.yaml").write_text(BASE.replace("num_neighbours: 2", "num_neighbours: 99"))
    assert all(line.startswith("base.yaml:9: run.merge.num_neighbours (99)") for line in mistakes(own))


def test_a_null_that_takes_nothing_away_is_refused_with_the_nearest_name(own: Path) -> None:
    own.write_text(OWN + "arms: {dilco: null}\nrun:\n  nods: null\n  sync: {interval_steps: null}\n")
    rule = "takes nothing away: no file that this one extends sets it"
    assert mistakes(own) == [
        f'own.yaml:4: arms.dilco (null) {rule}; did you mean "dilico"?',
        f'own.yaml:6: run.nods (null) {rule}; did you mean "nodes"?',
        f"own.yaml:7: run.sync.interval_steps (null) {rule}",
    ]


def test_where_null_is_a_value_it_stays_one() -> None:
    values = ("run.optim.clip_norm", "arms.spes.optim.clip_norm", "divergence.factor", "search", "arms.a.sweep.grid.x")
    assert all(map(is_null_a_value, values))
    others = ("run.nodes", "arms.spes", "arms", "sweep.grid.sync.interval_steps", "run.data.domains.wiki", "nmae.x")
    assert not any(map(is_null_a_value, others))


def test_name_and_question_are_the_studys_own(own: Path) -> None:
    own.write_text("extends: base.yaml\n")
    assert mistakes(own) == [
        f"own.yaml: {key} is missing: it is not taken from the file that this study extends"
        for key in ("name", "question")
    ]
    own.write_text(OWN.replace("own", "base"))
    assert mistakes(own) == [
        "own.yaml:1: name (base) is that of base.yaml too, which this study extends; give it another"
    ]
    assert read_study(own, ["name=other"]).mistakes == ()


@pytest.mark.parametrize(
    ("extends", "expected"),
    [
        ("bse.yaml", 'own.yaml:3: extends (bse.yaml) names no file in FOLDER; did you mean "base.yaml"?'),
        (
            "[base.yaml, gone/x.yaml]",
            "own.yaml:3: extends[1] (gone/x.yaml) names no file: there is no folder gone",
        ),
        ("3", "own.yaml:3: extends (3) must be the path of a study file, as seen from this one, or a list of them"),
        (
            "null",
            "own.yaml:3: extends (None) must be the path of a study file, as seen from this one, or a list of them",
        ),
        (
            "own.yaml",
            "own.yaml:3: extends (own.yaml) leads back to a file that extends this one: own.yaml -> own.yaml;"
            " take one of these out",
        ),
        (
            "loop.yaml",
            "loop.yaml:1: extends (own.yaml) leads back to a file that extends this one:"
            " own.yaml -> loop.yaml -> own.yaml; take one of these out",
        ),
    ],
)
def test_what_cannot_be_extended_is_one_mistake(own: Path, extends: str, expected: str) -> None:
    (own.parent / "loop.yaml").write_text("extends: own.yaml\n")
    own.write_text(OWN.replace("base.yaml", extends))
    assert [line.replace(str(own.parent), "FOLDER") for line in mistakes(own)] == [expected]


def test_a_misspelt_extends_is_named_and_an_override_of_it_refused(own: Path) -> None:
    own.write_text(OWN.replace("extends", "extend"))
    assert 'own.yaml:3: extend is not a setting; did you mean "extends"?' in mistakes(own)
    own.write_text(OWN)
    (line,) = mistakes(own, "extends=x.yaml")
    assert line == "override extends=x.yaml: what a study extends is read from its file alone"


def test_the_stored_study_holds_what_was_run(own: Path, tmp_path: Path) -> None:
    own.write_text(OWN + CHANGES)
    study = read_study(own, ["run.budget_tokens=50_000"])
    folder = StudyFolder(tmp_path / "results")
    folder.write_study(study, identify(study, expand(study), lambda corpus: "d1"), "command", {})
    stored = yaml.safe_load((folder.path / "study.json").read_text())
    assert [Path(path).name for path in stored["extends"]] == ["base.yaml"]
    assert stored["composed"]["run"]["budget_tokens"] == 50_000
    assert "extends" not in stored["composed"]
    assert list(stored["composed"]["arms"]) == ["centralized", "spes"]


def test_the_schema_of_the_file_knows_it() -> None:
    schema = study_schema()
    for text in (OWN + CHANGES.replace("clip_norm: null", "clip_norm: 2.0"), OWN + "sweep: null\nseeds: null\n", WHOLE):
        assert list(violations(yaml.safe_load(text), schema, schema)) == []
    for text in (OWN.replace("name", "nmae"), OWN.replace("base.yaml", "{a: b}"), OWN.split("extends")[0]):
        assert list(violations(yaml.safe_load(text), schema, schema))
