"""Numbers of each domain on their way from events to result.json, MLflow, a study's primary metric and the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from spes_core.data.mixture import Mixture
from tests.equivalence.participants import tiny
from tests.reference import report_fixture as made_up
from workbench.curves import validation_curve
from workbench.errors import StudyError
from workbench.metrics import domain_of, is_metric, unit
from workbench.recording import Recording
from workbench.report import domains
from workbench.report.captions import unigram_entropy
from workbench.report.compose import compose
from workbench.report.document import PAGE, PHONE, Figure, Table
from workbench.report.evidence import read
from workbench.report.findings import analyse
from workbench.report.printing import axis_value, metric_label
from workbench.results import compute_metrics
from workbench.spec import read_study
from workbench.tracking import run_metrics
from workbench.trials import expand

STUDY = Path(__file__).resolve().parents[2] / "studies" / "heterogeneous_data.yaml"
SUMS = {"wiki": [(300.0, 100, 400), (330.0, 100, 420)], "code": [(100.0, 50, 0), (140.0, 50, 0)]}
"""Loss sum, tokens and bytes of two nodes."""


def fields(loss_sum_nats: float, tokens: int, size: int) -> dict[str, float]:
    return {"loss_sum_nats": loss_sum_nats, "target_tokens": tokens, "target_bytes": size}


@pytest.fixture()
def recording(tmp_path: Path) -> Recording:
    """Two nodes that validated once, after step 12."""
    for node in range(2):
        domains = {name: fields(*shares[node]) for name, shares in SUMS.items()}
        totals = fields(*(sum(shares[node][at] for shares in SUMS.values()) for at in range(3)))  # type: ignore[arg-type]
        event = {"kind": "validation", "time_s": 1.0, "step": 12, **totals, "domains": domains}
        (tmp_path / f"node-{node}.jsonl").write_text(json.dumps(event) + "\n")
    return Recording(tmp_path)


def test_the_metrics_of_a_domain_are_sums_over_nodes_and_no_means_of_means(recording: Recording) -> None:
    config = tiny()
    curves = {"train": [], "validation": validation_curve(config, recording)}
    metrics = compute_metrics(config, recording, curves, None)
    assert metrics["eval/loss/wiki"] == 630 / 200
    assert metrics["eval/perplexity/wiki"] == math.exp(630 / 200)
    assert metrics["eval/bits_per_byte/wiki"] == pytest.approx(630 / math.log(2) / 820)
    assert metrics["eval/loss/code"] == 2.4
    assert "eval/bits_per_byte/code" not in metrics  # no byte of text
    assert metrics["eval/loss"] == pytest.approx(870 / 300)
    (point,) = curves["validation"]
    assert (point["tokens"], point["loss_nats/code"]) == (12 * config.tokens_per_step, 2.4)


def test_mlflow_gets_a_curve_for_each_domain() -> None:
    point = {"step": 5, "tokens": 10, "elapsed_s": 1.0, "uplink_bytes": 0, "loss_nats": 3.0, "loss_nats/wiki": 2.5}
    result = {"metrics": {"eval/loss/wiki": 2.5}, "curves": {"train": [], "validation": [point]}}
    points = {(name, step): value for name, value, _, step in run_metrics(result, 0, 9)}
    assert points[("eval/loss/wiki", 5)] == 2.5
    assert points[("eval/loss", 5)] == 3.0
    assert len([name for name, _ in points if name == "eval/loss/wiki"]) == 1


def test_metrics_of_a_domain_have_names_units_and_labels() -> None:
    assert is_metric("eval/loss/wiki-2") and domain_of("eval/bits_per_byte/wiki-2") == "wiki-2"
    assert not is_metric("eval/loss/") and not is_metric("train/loss/wiki") and domain_of("eval/loss") is None
    assert unit("eval/bits_per_byte/wiki") == "bits/byte"
    assert metric_label("eval/loss/wiki") == "validation loss on wiki (nats per token)"
    assert axis_value([{"wiki": 1.0, "code": 0.5}, {"code": 2.0}]) == "wiki 1, code 0.5; code 2"


def test_the_primary_metric_may_be_of_one_domain_that_every_arm_has() -> None:
    study = read_study(STUDY, ["metrics.primary.name=eval/loss/tables"])
    assert expand(study)
    with pytest.raises(
        StudyError, match=r"eval/loss/table\) is of the domain table, not among data.domains of arm cen"
    ):
        expand(read_study(STUDY, ["metrics.primary.name=eval/loss/table"]))


def test_a_search_asks_only_for_domains_that_its_arms_have(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    search = "\nsearch:\n  arm: spes_mixed\n  space: {sync.interval_steps: [5, 10]}\n  objective: eval/loss/OBJECTIVE\n"
    search += "  constraints:\n    - {metric: eval/bits_per_byte/LIMIT, tolerance: 0.02}\n"
    text = STUDY.read_text() + search
    path.write_text(text.replace("OBJECTIVE", "tables").replace("LIMIT", "windows"))
    assert expand(read_study(path))
    path.write_text(text.replace("OBJECTIVE", "table").replace("LIMIT", "window"))
    with pytest.raises(StudyError) as refused:
        expand(read_study(path))
    first, second = refused.value.mistakes
    assert "search.objective (eval/loss/table) is of the domain table, not among data.domains of arm spes_mix" in first
    assert "search.constraints[0].metric (eval/bits_per_byte/window) is of the domain window, not among" in second


def test_arms_of_heterogeneous_data_differ_only_in_which_node_reads_which_sequences() -> None:
    sizes = {"modules": 500, "tables": 90, "windows": 77, "network": 133}
    configs = {v.arm.name: v.config for v in expand(read_study(STUDY)) if v.seed == 0}
    assert len(configs) == 5
    orders = {name: Mixture(config.data, sizes, config.seed) for name, config in configs.items()}
    for step in (1, 2, 50, 146):
        read = {name: sorted(order.samples(step, 0, 1)) for name, order in orders.items()}
        assert all(samples == read["centralized"] for samples in read.values())
        apart = [{sample.domain for sample in orders["spes_apart"].samples(step, node, 4)} for node in range(4)]
        mixed = [{sample.domain for sample in orders["spes_mixed"].samples(step, node, 4)} for node in range(4)]
        assert apart == [{name} for name in sizes] and mixed == [set(sizes)] * 4


def domain_loss(arm: str, interval: int | None, seed: int, domain: str) -> float:
    return 3 + len(arm) / 50 + (interval or 0) / 500 + seed / 100 + len(domain) / 7


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made_up.write_study(tmp_path_factory.mktemp("study") / "mixed", intervals=(10, 50), curve_points=4)
    for path in folder.glob("trials/*/result.json"):
        result: dict[str, Any] = json.loads(path.read_text())
        trial = result["trial"]
        interval = trial["axes"].get("sync.interval_steps")
        for name in ("wiki", "code"):
            result["metrics"][f"eval/loss/{name}"] = domain_loss(trial["arm"], interval, trial["seed"], name)
            result["metrics"][f"eval/bits_per_byte/{name}"] = 1.5
        result["config"]["data"]["domains"] = {
            "wiki": {"corpus": "w", "weight": 3},
            "code": {"corpus": "c", "weight": 1},
        }
        counts = {name: {"train_tokens": 1000, "validation_tokens": 100} for name in ("wiki", "code")}
        result["data"] = {**result.get("data", {}), "domains": counts}
        path.write_text(json.dumps(result))
    return folder


def test_the_report_has_every_domain_s_losses_and_differences(study: Path) -> None:
    analysis = analyse(read(study))
    section = domains.section(analysis)
    assert section is not None
    table = next(block for block in section.blocks if isinstance(block, Table)).frame
    assert len(table) == 2 * 5  # two domains; one cell of centralized, two of each other arm
    for row in table.to_dict("records"):
        interval = None if math.isnan(row["x"]) else int(row["x"])
        ours, theirs = (
            [domain_loss(arm, at, seed, row["domain"]) for seed in range(3)]
            for arm, at in ((row["arm"], interval), ("centralized", None))
        )
        assert row["mean"] == pytest.approx(sum(ours) / 3)
        assert row["share"] == {"wiki": 0.75, "code": 0.25}[row["domain"]]
        if row["arm"] != "centralized":
            assert row["difference"] == pytest.approx(sum(a / b - 1 for a, b in zip(ours, theirs, strict=True)) / 3)
    figure = next(block for block in section.blocks if isinstance(block, Figure))
    assert len(figure.data) == 2 * 3 * 3  # domains, arms at their best x, seeds
    for layout in (PAGE, PHONE):
        titles = [axes.get_title(loc="left") for axes in figure.draw(layout).axes]
        assert titles == ["wiki", "code"]
    assert "domains" in [part.id for part in compose(read(study), study).sections]


def test_the_entropy_of_all_text_by_size_is_no_baseline_for_domains_in_equal_parts(study: Path, tmp_path: Path) -> None:
    plain = made_up.write_study(tmp_path / "plain", intervals=(10,), seeds=(0,), curve_points=3)
    assert unigram_entropy(read(plain)) == made_up.UNIGRAM_NATS
    assert unigram_entropy(read(study)) is None


def test_without_domains_the_report_says_nothing_of_them(tmp_path: Path) -> None:
    folder = made_up.write_study(tmp_path / "plain", intervals=(10,), seeds=(0,), curve_points=3)
    document = compose(read(folder), tmp_path)
    assert "domains" not in [section.id for section in document.sections]
    assert not [row for table in document.tables for row in table.frame.to_dict("records") if "domain" in str(row)]
