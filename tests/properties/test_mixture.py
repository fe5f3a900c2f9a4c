"""A mixture has its exact shares at every step, and reads each domain's samples once before any comes again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_core.config import DataConfig, DomainConfig
from spes_core.data.mixture import Mixture, Sample, Shares, mixtures, shares
from spes_core.data.order import sample_index
from tests.reference import mixture_slow

WEIGHTS = st.dictionaries(
    st.sampled_from("abcdef"), st.one_of(st.integers(0, 9), st.sampled_from([0.1, 0.25, 1 / 3, 1e-6, 2.5])), min_size=1
).filter(lambda weights: any(weights.values()))
SIZES = dict(zip("abcdef", (7, 40, 13, 1, 100, 29), strict=True))


def config_of(
    weights: dict[str, float] | None = None, per_node: tuple[dict[str, float], ...] = (), batch: int = 8, **data: Any
) -> DataConfig:
    domains = {name: DomainConfig(corpus=name, weight=weights.get(name, 0) if weights else None) for name in SIZES}
    return DataConfig(domains=domains, per_node=per_node, global_batch_sequences=batch, **data)


def read(mixture: Mixture, steps: range, parts: int) -> list[list[list[Sample]]]:
    """By step and part."""
    return [[mixture.samples(step, part, parts) for part in range(parts)] for step in steps]


@given(weights=WEIGHTS)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_places_are_dealt_as_if_one_after_another(weights: dict[str, float]) -> None:
    stream, counts, divided = mixture_slow.deal(weights), Counter[str](), Shares(weights)
    for place in range(200):
        assert {name: count for name, count in divided.before(place).items() if count} == counts
        name = next(stream)
        assert divided.at(place) == (name, counts[name])
        counts[name] += 1


@given(weights=WEIGHTS, place=st.integers(0, 10**12))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_shares_are_exact_up_to_rounding_at_every_place(weights: dict[str, float], place: int) -> None:
    counts, total = Shares(weights).before(place), sum(weights.values())
    assert sum(counts.values()) == place
    bound = (1 + sum(1 / n for n in range(1, len(counts)))) / 2
    for name, weight in weights.items():
        assert abs(counts.get(name, 0) - place * weight / total) <= bound + place * 1e-15
    assert all(name not in counts for name, weight in weights.items() if not weight)


@given(per_node=st.lists(WEIGHTS, min_size=1, max_size=4), run=st.integers(1, 7), seed=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_node_reads_what_a_simulation_reads(per_node: list[dict[str, float]], run: int, seed: int) -> None:
    config = config_of(per_node=tuple(per_node), batch=run * len(per_node))
    mixture = Mixture(config, SIZES, seed)
    for step, nodes in enumerate(mixture_slow.steps(per_node, run, 12), 1):
        for node, places in enumerate(nodes):
            expected = [Sample(name, sample_index(f"{seed}/{name}", count, SIZES[name])) for name, count in places]
            assert sorted(mixture.samples(step, node, len(per_node))) == sorted(expected)


@given(weights=WEIGHTS, seed=st.integers(0, 2**40), parts=st.sampled_from([1, 2, 3, 6]))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_one_mixture_for_all_is_the_same_for_any_number_of_parts(
    weights: dict[str, float], seed: int, parts: int
) -> None:
    mixture = Mixture(config_of(weights, batch=6), SIZES, seed)
    for step in (1, 2, 900):
        alone = mixture.samples(step, 0, 1)
        assert [sample for part in range(parts) for sample in mixture.samples(step, part, parts)] == alone


SHARED = [({"b": 1}, {"b": 1}), ({"b": 3, "e": 1}, {"e": 2, "b": 1}), ({"b": 1}, {"e": 1})]


@pytest.mark.parametrize("per_node", SHARED)
def test_nodes_that_share_a_domain_read_all_of_it_before_any_sample_comes_again(
    per_node: tuple[dict[str, float], ...],
) -> None:
    mixture = Mixture(config_of(per_node=per_node), SIZES, 5)
    samples = [sample for nodes in read(mixture, range(1, 61), 2) for node in nodes for sample in node]
    for name in {name for weights in per_node for name in weights}:
        of_domain = [sample.number for sample in samples if sample.domain == name]
        assert len(of_domain) >= SIZES[name]
        counts = Counter(of_domain)
        # The order within a step is shuffled, so the epochs are told apart by counts alone.
        assert set(counts) == set(range(SIZES[name]))
        assert max(counts.values()) - min(counts.values()) <= 1


def test_ranks_of_a_node_divide_what_the_node_reads_alone() -> None:
    per_node = ({"a": 1}, {"b": 1, "c": 1})
    mixture = Mixture(config_of(per_node=per_node), SIZES, 1)
    for step in (1, 2, 77):
        nodes, ranks = (read(mixture, range(step, step + 1), parts)[0] for parts in (2, 4))
        assert [ranks[0] + ranks[1], ranks[2] + ranks[3]] == nodes
        assert [sample for node in nodes for sample in node] == mixture.samples(step, 0, 1)


def test_parts_of_a_step_see_the_mixture_alike_over_many_steps() -> None:
    """With two sequences a part and four equal domains, dealing without shuffling gives each part two domains."""
    mixture = Mixture(config_of({"b": 1, "c": 1, "e": 1, "f": 1}), SIZES, 3)
    for part in range(4):
        counts = Counter(s.domain for step in range(1, 401) for s in mixture.samples(step, part, 4))
        assert set(counts) == {"b", "c", "e", "f"}
        assert all(abs(count - 200) < 60 for count in counts.values())


def test_by_size_an_epoch_holds_every_sample_of_every_domain_once() -> None:
    sizes = {"a": 7, "b": 40, "c": 13}
    config = replace(config_of(batch=4), domains={name: DomainConfig(corpus=name) for name in sizes})
    steps = range(1, sum(sizes.values()) // 4 + 1)
    samples = [s for nodes in read(Mixture(config, sizes, 2), steps, 2) for part in nodes for s in part]
    assert sorted(samples) == sorted(Sample(name, index) for name, size in sizes.items() for index in range(size))


def test_a_corpus_that_is_not_divided_is_read_as_ever() -> None:
    mixture = Mixture(DataConfig(global_batch_sequences=8), {"": 1000}, 9)
    for step, part in ((1, 0), (1, 3), (500, 2)):
        places = range((step - 1) * 8 + part * 2, (step - 1) * 8 + part * 2 + 2)
        assert mixture.samples(step, part, 4) == [Sample("", sample_index(9, place, 1000)) for place in places]


def test_shares_of_a_run_are_the_means_of_its_nodes() -> None:
    assert mixtures(config_of()) == []
    by_size = shares(config_of(), SIZES)
    assert by_size["b"] == pytest.approx(40 / sum(SIZES.values()))
    per_node = shares(config_of(per_node=({"a": 1}, {"a": 1, "b": 3})), SIZES)
    assert per_node == {"a": 0.625, "b": 0.375, "c": 0, "d": 0, "e": 0, "f": 0}
