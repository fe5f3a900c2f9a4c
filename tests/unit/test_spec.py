"""Study files: what is read, what is refused, and where a mistake is said to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.errors import StudyError
from workbench.spec import Study, read_study
from workbench.trials import expand
from workbench.yamlsource import read_yaml

STUDY = """\
schema: 1
name: probe
question: What happens?
defaults: [model/tiny, data/default, launcher/local]
run:
  nodes: 4
  budget_tokens: 100_000
arms:
  centralized: {method: centralized, role: reference}
  spes: {method: spes}
sweep:
  grid:
    sync.interval_steps: [5, 10]
"""


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    path = tmp_path / "probe.yaml"
    path.write_text(STUDY)
    return path


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def mistakes(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(StudyError) as caught:
        expand(read_study(path, overrides))
    return tuple(mistake.replace(f"{path}", "FILE") for mistake in caught.value.mistakes)


def settings(study: Study, arm: str) -> dict[str, Any]:
    return next(item.settings for item in study.arms if item.name == arm)


# --- YAML ---


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1e2", 100.0),
        ("-2.5E+3", -2500.0),
        ("2_000_000", 2_000_000),
        ("010", 10),
        (".5", 0.5),
        ("true", True),
        ("null", None),
        ("yes", "yes"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("2026-11-29", "2026-11-29"),
    ],
)
def test_scalar_means_what_it_looks_like(tmp_path: Path, text: str, value: object) -> None:
    read = read_yaml(written(tmp_path / "a.yaml", f"a: {text}\n")).data["a"]
    assert read == value
    assert type(read) is type(value)


def test_key_given_twice_is_refused_with_both_lines(study_file: Path) -> None:
    study_file.write_text(STUDY.replace("  budget", "  nodes: 2\n  budget"))
    assert mistakes(study_file) == ("FILE:7: run.nodes is given twice, first on line 6; keep one",)


def test_dotted_key_repeats_the_nested_key(study_file: Path) -> None:
    study_file.write_text(STUDY.replace("  budget", "  sync: {interval_steps: 3}\n  sync.interval_steps: 2\n  budget"))
    assert "FILE:8: run.sync.interval_steps is given twice, first on line 7; keep one" in mistakes(study_file)


def test_merge_keys_are_no_repetition(tmp_path: Path) -> None:
    source = read_yaml(written(tmp_path / "a.yaml", "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n"))
    assert source.data["b"] == {"x": 1, "y": 3}
    assert source.mistakes == ()


@pytest.mark.parametrize(
    ("text", "place"),
    [("a: [1,\n", "2:1"), ("a: b: c\n", "1:5"), ("a: 1\n\tb: 2\n", "2:1"), ("a: &x [*y]\n", "1:8")],
)
def test_syntax_error_is_one_line_with_line_and_column(tmp_path: Path, text: str, place: str) -> None:
    path = written(tmp_path / "a.yaml", text)
    with pytest.raises(StudyError) as caught:
        read_yaml(path)
    (mistake,) = caught.value.mistakes
    assert mistake.startswith(f"{path}:{place}: not valid YAML: ")
    assert "\n" not in mistake


@pytest.mark.parametrize("text", ["a: \x01\n", "- 1\n", "3\n", "a: &x [*x]\n", "[1]: 2\n", "a..b: 1\n"])
def test_what_is_no_mapping_of_names_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "a.yaml", text)
    with pytest.raises(StudyError) as caught:
        expand(read_study(path))
    assert all(str(path) in mistake and "\n" not in mistake for mistake in caught.value.mistakes)


def test_missing_file_names_the_one_that_was_meant(study_file: Path) -> None:
    (mistake,) = mistakes(study_file.with_name("prob.yaml"))
    assert mistake.endswith(f'no such file in {study_file.parent}; did you mean "probe.yaml"?')


# --- Mistakes ---


def test_every_mistake_is_listed_at_once_with_its_line(study_file: Path) -> None:
    study_file.write_text(
        STUDY.replace("model/tiny", "model/tinny")
        .replace("nodes: 4", "nodes: four\n  merge: {num_neighbours: 8, alfa: 0.1}")
        .replace("role: reference", "role: referenc")
        .replace("[5, 10]", "[5, 0]")
        + "seed: [0]\nequal: [modl]\nresources: {timeout: soon}\n"
    )
    assert mistakes(study_file) == (
        'FILE:4: defaults[0] (model/tinny) names no config of the group model; did you mean "tiny"?;'
        " valid names: 1b, 2b, 7b, 9b, small, tiny",
        "FILE:6: run.nodes ('four') must be a whole number",
        'FILE:7: run.merge.alfa is not a setting; did you mean "alpha"?',
        # Not told: whether num_neighbours (8) is below the experts of a model that is not known.
        "FILE:10: arms.centralized.role ('referenc') must be one of treatment, baseline, reference;"
        ' did you mean "reference"?',
        "FILE:14: sweep.grid.sync.interval_steps (0) must be at least 1",
        'FILE:15: seed is not a setting of a study; did you mean "seeds"?',
        'FILE:16: equal[0] (modl) is not a setting of a run; did you mean "model"?',
        "FILE:17: resources.timeout (soon) must be a duration such as 90s, 30min or 2h",
    )


def test_unknown_names_of_groups_list_the_valid_ones(study_file: Path) -> None:
    study_file.write_text(STUDY.replace("method: spes", "method: spess").replace("launcher/local", "lancher/local"))
    listed = mistakes(study_file)
    assert 'defaults[2] (lancher/local) names no config group; did you mean "launcher"?' in listed[0]
    assert listed[1].startswith("FILE:10: arms.spes.method (spess) names no config of the group method")
    assert listed[1].endswith("valid names: centralized, dilico, diloco, local, spes")
    assert len(listed) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.nods=2", 'run.nods is not a setting; did you mean "nodes"?'),
        ("run.nodes=x", "run.nodes ('x') must be a whole number"),
        ("run.nodes=5", "run.data.global_batch_sequences (16) must be a multiple of nodes"),
        ("arms.spes.merge.num_neighbours=16", "arms.spes.merge.num_neighbours (16) must be below"),
        ("sweep.grid.sync.interval_steps=[-1]", "sweep.grid.sync.interval_steps (-1) must be at least 1"),
        ("sweep.grid.sync.interval_steps=5", "sweep.grid.sync.interval_steps (5) must be a list"),
        ("seeds=[0,0]", "seeds ([0, 0]) must differ"),
        ("model=huge", "names no config of the group model"),
        ("run.nodes=1,2", "write sweep.grid.nodes=[value,value]"),
        ("method=spes", "each arm has its own method"),
        ("run.nodes", "is not of the form key=value"),
        ("metrics.primary.name=eval/los", '(eval/los) is not a metric; did you mean "eval/loss"?'),
        ("report.x=merge.alpha", "report.x (merge.alpha) is no axis of any arm; axes: sync.interval_steps; sweep it"),
        ("report.x=model.num_expert", 'is not a setting of a run; did you mean "model.num_experts"?'),
        ("+sweep.exclude=[{sync.interval_steps:7}]", "(sync.interval_steps: 7) lies on no axis; values: 5, 10"),
        ("+sweep.exclude=[{optim.lr:1}]", "(optim.lr) is no axis of this sweep; axes: sync.interval_steps"),
        ("~run.optim", "Could not delete"),
        ("+run.nodes=2", "Could not append"),
    ],
)
def test_mistake_of_an_override_names_it(study_file: Path, override: str, message: str) -> None:
    (mistake,) = mistakes(study_file, override)
    assert mistake.startswith(f"override {override}: ")
    assert message in mistake


def test_rule_about_a_default_is_blamed_on_what_was_written(study_file: Path) -> None:
    study_file.write_text(STUDY.replace("model/tiny, ", "").replace("nodes: 4", "nodes: 4\n  model.num_experts: 2"))
    (mistake,) = mistakes(study_file)
    assert mistake.startswith("FILE:7: run.merge.num_neighbours (2) must be below model.num_experts (2)")
    study_file.write_text(STUDY.replace("nodes: 4", "nodes: 5").replace("data/default, ", ""))
    # Mistakes are sorted by file, and where this checkout lies decides which file comes first.
    blamed = "FILE:6: run.data.global_batch_sequences (32) must be a multiple"
    assert [mistake for mistake in mistakes(study_file) if mistake.startswith(blamed)]


# --- Composition ---


def test_overrides_change_what_the_file_says(study_file: Path) -> None:
    study = read_study(
        study_file,
        ["model=small", "run.nodes=2", "run.model.d_model=64", "seeds=[3,4]", "arms.spes.merge.alpha=1e-3",
         "launcher.threads=2", "sweep.grid.sync.interval_steps=[7]", "hardware=l40s"],
    )  # fmt: skip
    variant = next(item for item in expand(study) if item.arm.name == "spes")
    assert study.seeds == (3, 4)
    assert study.launcher.threads == 2
    assert study.hardware.memory_gb == 48
    assert variant.config.nodes == 2
    assert (variant.config.model.num_layers, variant.config.model.d_model) == (4, 64)
    assert variant.config.merge.alpha == 0.001
    assert variant.axes == {"sync.interval_steps": 7}


def test_overrides_add_and_remove_arms_and_axes(study_file: Path) -> None:
    overrides = ["~arms.centralized", "+arms.outer.method=diloco", "~sweep.grid.sync.interval_steps"]
    study = read_study(study_file, [*overrides, "sweep.grid.optim.lr=[1e-3,1e-2]"])
    assert [arm.name for arm in study.arms] == ["spes", "outer"]
    assert [variant.axes for variant in expand(study)] == [{"optim.lr": 0.001}, {"optim.lr": 0.01}] * 2
    assert settings(study, "outer")["outer"] == {"kind": "nesterov"}


def test_word_of_higher_precedence_wins(study_file: Path) -> None:
    """defaults < run < method group < arm < axis."""

    def value(path: str, *overrides: str) -> Any:
        variant = expand(read_study(study_file, overrides))[-1]
        first, second = path.split(".")
        return getattr(getattr(variant.config, first), second)

    assert value("model.num_layers") == 2
    assert value("model.num_layers", "run.model.num_layers=3") == 3
    assert value("merge.enabled") is True
    assert value("merge.enabled", "run.merge.enabled=false") is True
    assert value("merge.enabled", "arms.spes.merge.enabled=false") is False
    axis = "sweep.grid.merge.enabled=[true]"
    assert value("merge.enabled", "arms.spes.merge.enabled=false", axis) is True


def test_method_may_stand_once_under_run(study_file: Path) -> None:
    text = STUDY.replace("spes: {method: spes}", "spes: {}").replace("nodes: 4", "nodes: 4\n  method: dilico")
    study_file.write_text(text)
    assert settings(read_study(study_file), "spes")["partition"] == {"kind": "full"}
    study_file.write_text(STUDY.replace("spes: {method: spes}", "spes: {}"))
    assert mistakes(study_file)[0].startswith("FILE:10: arms.spes.method is missing; valid names: centralized")


def test_reading_twice_gives_equal_studies(study_file: Path) -> None:
    assert read_study(study_file) == read_study(study_file)
    changed = read_study(study_file, ["run.nodes=2"])
    assert settings(changed, "spes")["nodes"] == 2
    assert settings(read_study(study_file), "spes")["nodes"] == 4


# --- What would be accepted and then not done ---


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("  nodes: 4", "  nodes: 4\n  seed: 5", "run.seed (5) must be given to all arms alike: list it under seeds"),
        ("spes: {method: spes}", "spes: {method: spes, seed: 3}", "arms.spes.seed (3) must be given to all arms alike"),
        ("schema: 1", "schema: 1\nseed: [0]", 'seed is not a setting of a study; did you mean "seeds"?'),
        (
            "spes: {method: spes}",
            "spes: {method: spes, role: reference}",
            "arms.spes.role (reference) must be one arm's; centralized has it already",
        ),
        ("name: probe", f"name: {'n' * 81}", "must be made of at most 80 letters"),
        ("  nodes: 4", "  nodes: 4\n  data: {corpus: ' '}", "must name a corpus"),
    ],
)
def test_what_would_silently_not_happen_is_refused(study_file: Path, old: str, new: str, words: str) -> None:
    found = mistakes(written(study_file, STUDY.replace(old, new, 1)))
    assert len([mistake for mistake in found if words in mistake]) == 1, found
