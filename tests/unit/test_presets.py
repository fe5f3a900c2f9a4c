"""Every model preset has the counts that its file states, and the large ones are the models of the design."""

from __future__ import annotations

import re
from typing import Any

import pytest

from spes_core.config import DataConfig, ModelConfig, RunConfig, check
from spes_core.model.counting import parameter_counts
from spes_core.partition import sparse
from spes_core.structure import build
from tests.reference.parameter_count import count_parameters
from workbench.groups import CONF, group_options
from workbench.yamlsource import read_yaml

PRESETS = group_options("model")
STATED = re.compile(r"# ([\d,]+) parameters, ([\d,]+) active per token; ([\d,]+) trained by each of (\d+) nodes\.")

# layers / d_model / heads / kv / experts / top-k / expert hidden / vocabulary
SHAPES = {
    "1b": (12, 768, 12, 12, 16, 2, 2048, 151665),
    "2b": (16, 1536, 12, 12, 16, 2, 1280, 151665),
    "7b": (16, 2048, 16, 16, 32, 4, 2048, 151665),
    "9b": (28, 2048, 16, 8, 8, 2, 6144, 151936),
}


def preset(name: str) -> ModelConfig:
    return build(ModelConfig, read_yaml(CONF / "model" / f"{name}.yaml").data)


def stated(name: str) -> tuple[int, int, int, int]:
    match = STATED.search((CONF / "model" / f"{name}.yaml").read_text())
    assert match, f"{name}.yaml does not state its counts"
    total, active, trained, nodes = (int(text.replace(",", "")) for text in match.groups())
    return total, active, trained, nodes


def test_the_presets_of_the_design_ship() -> None:
    assert set(PRESETS) == {"tiny", "small", *SHAPES}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_counts_that_its_file_states(name: str) -> None:
    total, active, trained, nodes = stated(name)
    model = preset(name)
    owned = [len(experts) for experts in sparse(model.num_experts, nodes).experts_by_node]
    assert len(set(owned)) == 1
    assert count_parameters(model, model.num_experts) == total
    assert count_parameters(model, model.top_k) == active
    assert count_parameters(model, owned[0]) == trained
    counts = parameter_counts(model, range(owned[0]))
    assert (counts.total, counts.active, counts.trained) == (total, active, trained)


@pytest.mark.parametrize("name", SHAPES)
def test_a_large_preset_has_the_shape_of_the_design(name: str) -> None:
    m = preset(name)
    shape: tuple[Any, ...] = (m.num_layers, m.d_model, m.num_heads, m.num_kv_heads, m.num_experts, m.top_k)
    assert (*shape, m.expert_hidden, m.vocab_size) == SHAPES[name]
    assert not m.tie_embeddings
    assert (m.qk_norm, m.normalize_top_k) == (("per_head", True) if name == "9b" else ("full", False))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_breaks_no_rule(name: str) -> None:
    model = preset(name)
    assert check(RunConfig(model=model, data=DataConfig(tokenizer_vocab_size=min(model.vocab_size, 50_000)))) == []


def test_2b_is_the_model_of_the_paper_on_16_nodes() -> None:
    total, active, trained, nodes = stated("2b")
    assert nodes == 16
    assert [round(count / 1e9, 1) for count in (total, active, trained)] == [2.1, 0.8, 0.7]


def test_7b_sends_what_the_design_says() -> None:
    total, active, trained, nodes = stated("7b")
    assert nodes == 4
    assert [round(count / 1e9, 2) for count in (total, active, trained)] == [7.33, 1.70, 2.50]
    assert [round(4 * count / 1e9, 1) for count in (trained, total)] == [10.0, 29.3]  # fp32 GB: SPES, full model
