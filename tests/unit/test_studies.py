"""The studies that ship: each plans, says its cost, and is explained in studies/README.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from workbench.groups import group_names, group_options
from workbench.plan import merge_warning, predict
from workbench.spec import read_study
from workbench.trials import expand, without_search

STUDIES = Path(__file__).resolve().parents[2] / "studies"
FILES = sorted(STUDIES.glob("*.yaml"))


def test_studies_ship() -> None:
    first = {"quickstart", "sync_interval", "baselines", "merge_warmup", "node_scaling"}
    others = {"wire_codecs", "faulty_node", "h_sweet_spot", "links", "heterogeneous_data"}
    assert first | others <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_study_plans(path: Path) -> None:
    study = read_study(path)
    variants = expand(study)
    assert study.name == path.stem
    assert study.question.endswith("?")
    assert all(predict(variant.config).steps >= 1 for variant in variants)
    assert merge_warning(variants) is None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_study_says_what_it_costs(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    study = read_study(path)
    trials = len(without_search(study, expand(study)))
    if study.search is not None:
        confirm = study.search.confirm
        trials += study.search.target * len(study.seeds) + len(confirm.seeds) * (confirm.top + 1)
    assert first.startswith(f"# Cost: {'at most ' if study.search else ''}{trials} trials")
    assert f"({path.name})" in (STUDIES / "README.md").read_text()


def test_faulty_node_puts_every_rule_and_quarantine_to_the_same_fault() -> None:
    variants = expand(read_study(STUDIES / "faulty_node.yaml"))
    by_arm = {arm: [v.config for v in variants if v.arm.name == arm] for arm in {v.arm.name for v in variants}}
    rules = {"mean", "clipped", "trimmed", "median"}
    for kind in ("noise", "sign_flip"):
        assert {config.aggregate.rule for config in by_arm["full"] if config.faults.kind == kind} == rules
        assert [c.aggregate.quarantine_factor for c in by_arm["sparse_quarantine"] if c.faults.kind == kind] == [3.0]
    assert {config.faults.kind for arm in ("healthy", "sparse_healthy") for config in by_arm[arm]} == {"none"}
    faults = {config.faults for configs in by_arm.values() for config in configs if config.faults.kind != "none"}
    assert len({(fault.node, fault.scale, fault.from_round) for fault in faults}) == 1


@pytest.mark.parametrize(
    "choice",
    [f"{group}={name}" for group in group_names() if group != "method" for name in group_options(group)],
)
def test_every_shipped_group_composes(choice: str) -> None:
    assert expand(read_study(STUDIES / "quickstart.yaml", [choice]))


def test_every_method_plans() -> None:
    overrides = [f"arms.{method}.method={method}" for method in group_options("method")]
    variants = expand(read_study(STUDIES / "quickstart.yaml", overrides))
    by_method = {variant.config.method: variant.config for variant in variants}
    assert by_method.keys() == {"spes", "dilico", "diloco", "centralized", "local"}
    assert {method: config.sync.exchange for method, config in by_method.items()} == {
        "spes": "rounds",
        "dilico": "rounds",
        "diloco": "rounds",
        "centralized": "gradients",
        "local": "none",
    }
    assert by_method["spes"].partition.kind == "sparse"
    assert {config.partition.kind for method, config in by_method.items() if method != "spes"} == {"full"}
    assert by_method["diloco"].outer.kind == "nesterov"


def test_example_in_the_readme_plans(tmp_path: Path) -> None:
    example = re.search(r"```yaml\n(.*?)```", (STUDIES / "README.md").read_text(), re.DOTALL)
    assert example is not None
    path = tmp_path / "example.yaml"
    path.write_text(example[1])
    assert [variant.label for variant in expand(read_study(path, ["seeds=[0]"]))] == [
        "centralized-seed=0",
        "spes-interval_steps=10-seed=0",
        "spes-interval_steps=100-seed=0",
    ]


def test_codecs_are_compared_at_equal_rounds_and_halve_the_bytes_each_time() -> None:
    variants = expand(read_study(STUDIES / "wire_codecs.yaml"))
    costs = {variant.config.wire.dtype: predict(variant.config) for variant in variants}
    assert list(costs) == ["float32", "bfloat16", "int8", "int4"]
    assert len({(cost.steps, cost.rounds, cost.merges) for cost in costs.values()}) == 1
    sent = [cost.uplink_gb for cost in costs.values()]
    assert sent[1] == sent[0] / 2
    assert 0.25 <= sent[2] / sent[0] <= 0.26 and 0.125 <= sent[3] / sent[0] <= 0.13
