"""Trials: what multiplies what, what a trial's identity depends on, and which comparisons are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from spes_core.config import RunConfig
from workbench.errors import StudyError
from workbench.plan import merge_warning, predict
from workbench.spec import read_study
from workbench.sweep import axis_label
from workbench.trials import Corpus, Trial, Variant, expand, identify, identity

HEAD = """\
schema: 1
name: probe
question: What happens?
defaults: [model/tiny, data/default]
run: {nodes: 4, budget_tokens: 409_600, merge: {interval_steps: 20, until_step: 80}}
"""
ARMS = """\
arms:
  centralized: {method: centralized, role: reference}
  dilico: {method: dilico}
  spes: {method: spes}
"""


def variants_of(tmp_path: Path, body: str, *overrides: str) -> list[Variant]:
    path = tmp_path / "probe.yaml"
    path.write_text(HEAD + body)
    return expand(read_study(path, overrides))


def trials_of(tmp_path: Path, body: str, *overrides: str, data_digest: str = "d1") -> list[Trial]:
    path = tmp_path / "probe.yaml"
    path.write_text(HEAD + body)
    study = read_study(path, overrides)
    return identify(study, expand(study), lambda corpus: data_digest)


def refusal(tmp_path: Path, body: str, *overrides: str) -> str:
    with pytest.raises(StudyError) as caught:
        variants_of(tmp_path, body, *overrides)
    (mistake,) = caught.value.mistakes
    return mistake.replace(str(tmp_path / "probe.yaml"), "FILE")


def labels(variants: Sequence[Variant]) -> list[str]:
    return [variant.label for variant in variants]


# --- Expansion ---


def test_axis_multiplies_only_the_arms_that_read_it(tmp_path: Path) -> None:
    sweep = "sweep: {grid: {sync.interval_steps: [5, 10], merge.num_neighbours: [1, 3]}}\nseeds: [0, 1]\n"
    arms = [variant.arm.name for variant in variants_of(tmp_path, ARMS + sweep)]
    seeds, intervals, neighbours = 2, 2, 2
    assert arms.count("centralized") == seeds
    assert arms.count("dilico") == seeds * intervals
    assert arms.count("spes") == seeds * intervals * neighbours


def test_axis_applies_where_another_axis_makes_it_apply(tmp_path: Path) -> None:
    sweep = "sweep: {grid: {merge.enabled: [true, false], merge.alpha: [0.1, 0.2]}}\n"
    variants = variants_of(tmp_path, "arms: {spes: {method: spes}}\n" + sweep)
    assert labels(variants) == [
        "spes-enabled=true-alpha=0.1-seed=0",
        "spes-enabled=true-alpha=0.2-seed=0",
        "spes-enabled=false-seed=0",
    ]


def test_arm_replaces_adds_and_removes_axes(tmp_path: Path) -> None:
    body = """\
arms:
  fast: {method: dilico, sweep: {grid: {sync.interval_steps: [50]}}}
  pulled: {method: spes, sweep: {grid: {merge.alpha: [0.1, 0.2]}}}
  single: {method: spes, sync.interval_steps: 7, sweep: {grid: {sync.interval_steps: null}}}
sweep: {grid: {sync.interval_steps: [5, 10]}}
"""
    assert labels(variants_of(tmp_path, body)) == [
        "fast-interval_steps=50-seed=0",
        "pulled-interval_steps=5-alpha=0.1-seed=0",
        "pulled-interval_steps=5-alpha=0.2-seed=0",
        "pulled-interval_steps=10-alpha=0.1-seed=0",
        "pulled-interval_steps=10-alpha=0.2-seed=0",
        "single-seed=0",
    ]


def test_zip_varies_together_and_exclude_leaves_out(tmp_path: Path) -> None:
    body = """\
arms: {spes: {method: spes}}
sweep:
  grid: {sync.interval_steps: [5, 10]}
  zip: {merge.alpha: [0.1, 0.2], merge.num_neighbours: [1, 3]}
  exclude: [{sync.interval_steps: 10, merge: {alpha: 0.1}}]
"""
    axes = [tuple(variant.axes.values()) for variant in variants_of(tmp_path, body)]
    assert axes == [(5, 0.1, 1), (5, 0.2, 3), (10, 0.2, 3)]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("zip: {merge.alpha: [0.1], merge.num_neighbours: [1, 3]}", "must have as many values on each axis"),
        ("grid: {merge.alpha: [0.1]}, zip: {merge.alpha: [0.1]}", "is also an axis of the grid"),
        (
            "grid: {merge.alpha: [0.1]}, exclude: [{nodes: 3}]",
            "(nodes) is no axis of this sweep; axes: merge.alpha",
        ),
        ("grid: {merge.alpha: [0.1]}, exclude: [{merge.alpha: 0.1}]", "has no point left"),
        ("grid: {seed: [1]}", "seeds are replicates"),
        ("grid: {method: [spes]}", "methods are compared as arms"),
        ("grid: {merge.alpha: []}", "must be a list of at least one value"),
        ("grid: {merge.beta: [1]}", "is not a setting; valid names: alpha"),
    ],
)
def test_sweep_that_makes_no_sense_is_refused(tmp_path: Path, sweep: str, message: str) -> None:
    mistake = refusal(tmp_path, f"arms: {{spes: {{method: spes}}}}\nsweep: {{{sweep}}}\n")
    assert message in mistake
    assert mistake.startswith(("FILE:6: ", "FILE:7: "))


def test_equal_points_run_once(tmp_path: Path) -> None:
    body = "arms: {spes: {method: spes}}\nsweep: {grid: {merge.alpha: [0.1, 1e-1, 0.2]}}\n"
    assert [variant.axes["merge.alpha"] for variant in variants_of(tmp_path, body)] == [0.1, 0.2]


def test_arm_that_repeats_an_earlier_one_is_refused(tmp_path: Path) -> None:
    mistake = refusal(tmp_path, "arms:\n  a: {method: spes}\n  b: {method: spes, merge.until_step: 80}\n")
    assert mistake.startswith("FILE:8: arms.b resolves to runs that earlier arms already hold")


@pytest.mark.parametrize(
    "axis", ["data.max_repetition: [null, 0.1]", "data.text_field: [text, code]", "data.tokenizer: [bpe, /tokenizer]"]
)
def test_runs_on_corpora_that_are_prepared_otherwise_are_not_equal(tmp_path: Path, axis: str) -> None:
    assert len(variants_of(tmp_path, f"arms: {{spes: {{method: spes}}}}\nsweep: {{grid: {{{axis}}}}}\n")) == 2
    path, _, values = axis.partition(": ")
    other = values.strip("[]").split(", ")[1]
    arms = f"arms:\n  a: {{method: spes}}\n  b: {{method: spes, {path}: {other}}}\nequal: [model]\n"
    assert len(variants_of(tmp_path, arms)) == 2


def test_each_seed_reaches_its_config(tmp_path: Path) -> None:
    variants = variants_of(tmp_path, ARMS + "seeds: [7, 3]\n")
    assert {(variant.arm.name, variant.config.seed) for variant in variants} == {
        (arm, seed) for arm in ("centralized", "dilico", "spes") for seed in (7, 3)
    }


def test_axis_labels_are_short_but_never_shared() -> None:
    axes = ("merge.interval_steps", "sync.interval_steps", "merge.alpha", "nodes")
    assert [axis_label(path, axes) for path in axes] == [
        "merge.interval_steps",
        "sync.interval_steps",
        "alpha",
        "nodes",
    ]


def test_trial_names_are_distinct_and_fit_any_file_system(tmp_path: Path) -> None:
    body = """\
arms: {a: {method: spes}}
sweep: {grid: {data.corpus: ['/some where/ü:*?', '/other'], optim.clip_norm: [null, 1.0]}}
"""
    names = [trial.name for trial in trials_of(tmp_path, body)]
    assert len(set(names)) == 4
    assert all(re.fullmatch(r"[A-Za-z0-9._=+,-]{1,140}", name) for name in names)


# --- Identity ---

IDS = """
import sys
from pathlib import Path
from workbench.spec import read_study
from workbench.trials import expand, identify
study = read_study(Path(sys.argv[1]))
print(*(trial.id for trial in identify(study, expand(study), lambda corpus: "d1")))
"""


def test_ids_are_the_same_in_every_process(tmp_path: Path) -> None:
    ids = [trial.id for trial in trials_of(tmp_path, ARMS)]
    done = subprocess.run(
        [sys.executable, "-c", IDS, str(tmp_path / "probe.yaml")],
        env={**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ids


def test_identity_is_what_decides_numbers(tmp_path: Path) -> None:
    (base,) = trials_of(tmp_path, "arms: {spes: {method: spes}}\n")

    def changed(*overrides: str, body: str = "arms: {spes: {method: spes}}\n", data_digest: str = "d1") -> bool:
        (trial,) = trials_of(tmp_path, body, *overrides, data_digest=data_digest)
        return trial.id != base.id

    assert not changed("launcher.threads=4", "launcher.device=cpu", "question=Why", "name=other")
    assert not changed("run.log.interval_steps=3", "run.round.timeout_s=5", "run.data.corpus=/elsewhere")
    assert not changed("report.tolerance=0.5", "resources.timeout=9h", "run.outer.lr=0.1")
    assert not changed(body="arms: {renamed: {method: spes, role: baseline}}\n")
    assert changed("run.optim.lr=1e-5")
    assert changed("seeds=[1]")
    assert changed("run.merge.alpha=0.3")
    assert changed("run.data.validation_fraction=0.03")
    assert changed(data_digest="d2")
    assert changed(body="arms: {spes: {method: dilico}}\n")


def test_identity_is_sixteen_hex_digits() -> None:
    assert re.fullmatch(r"[0-9a-f]{16}", identity(RunConfig(), "d1"))


def test_each_trial_gets_the_digest_of_its_own_corpus(tmp_path: Path) -> None:
    path = tmp_path / "probe.yaml"
    path.write_text(HEAD + "arms: {a: {method: spes}}\nsweep: {grid: {data.corpus: [x, y]}}\n")
    study = read_study(path)
    asked: list[Corpus] = []
    first, second = identify(study, expand(study), lambda corpus: (asked.append(corpus), corpus.path)[1])
    assert [corpus.path for corpus in asked] == ["x", "y"]
    assert first.id != second.id


# --- The equality gate ---


def test_arms_that_differ_in_what_must_be_equal_are_refused(tmp_path: Path) -> None:
    mistake = refusal(tmp_path, ARMS + "equal: [optim]\n", "arms.dilico.optim.lr=1e-4")
    assert mistake.startswith("override arms.dilico.optim.lr=1e-4: arms.dilico.optim.lr must be equal in all arms")
    assert "(centralized has 0.003, dilico has 0.0001, spes has 0.003)" in mistake


def test_differences_on_a_declared_axis_are_no_differences(tmp_path: Path) -> None:
    body = """\
arms:
  a: {method: spes}
  b: {method: dilico, sweep: {grid: {optim.lr: [1e-4, 1e-3]}}}
equal: [optim]
"""
    assert len(variants_of(tmp_path, body)) == 3
    assert "optim.beta2 must be equal" in refusal(tmp_path, body, "arms.a.optim.beta2=0.9")


def test_what_is_not_declared_equal_may_differ(tmp_path: Path) -> None:
    assert len(variants_of(tmp_path, ARMS + "equal: [model]\n", "arms.spes.optim.lr=1e-4")) == 3


def test_budgets_that_differ_after_rounding_to_steps_are_refused(tmp_path: Path) -> None:
    body = ARMS + "equal: [budget_tokens]\n"
    mistake = refusal(tmp_path, body, "arms.spes.data.sequence_length=120")
    assert mistake.startswith("FILE:5: run.budget_tokens in whole steps differs between arms")
    assert "centralized trains on 409600" in mistake
    assert "spes trains on 408960" in mistake
    assert variants_of(tmp_path, body, "arms.spes.data.sequence_length=64")


def test_runs_that_merge_unequally_often_are_warned_about(tmp_path: Path) -> None:
    sweep = "sweep: {grid: {sync.interval_steps: [10, 20, 50]}}\n"
    warning = merge_warning(variants_of(tmp_path, ARMS + sweep))
    assert warning is not None
    assert "1 in spes-interval_steps=50-seed=0; 3 in spes-interval_steps=10-seed=0 and 1 more" in warning
    assert merge_warning(variants_of(tmp_path, ARMS + sweep, "sweep.grid.sync.interval_steps=[5,20]")) is None
    swept = "sweep: {grid: {merge.until_step: [40, 80]}}\n"
    assert merge_warning(variants_of(tmp_path, ARMS + swept)) is None


def test_prediction_is_that_of_the_most_loaded_node(tmp_path: Path) -> None:
    (uneven,) = variants_of(tmp_path, "arms: {spes: {method: spes}}\n", "run.model.num_experts=9")
    prediction = predict(uneven.config)
    model, experts_of_largest_node = uneven.config.model, 3
    per_expert = model.num_layers * 3 * model.d_model * model.expert_hidden
    assert prediction.parameters_total - prediction.parameters_trained == (9 - experts_of_largest_node) * per_expert
    assert prediction.uplink_gb == prediction.rounds * prediction.parameters_trained * 4 / 1e9
    assert prediction.uplink_time_s(8.0) == pytest.approx(prediction.uplink_gb)
