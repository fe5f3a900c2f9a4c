"""Several domains in one folder: windows keep inside them, mixtures are obeyed, validation is told apart by domain."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spes_core.config import DataConfig, RunConfig, digest, from_dict
from spes_core.data import shards
from spes_core.data.batches import TokenSource, ValidationBatch, even_shares
from spes_core.errors import ConfigError, DataError
from spes_core.events import EventWriter, read_events
from spes_core.model.losses import IGNORED_TARGET
from spes_core.node import build_decoder
from spes_core.train.loop import Training
from spes_core.train.surroundings import Place
from spes_core.train.validate import validate
from tests.equivalence.participants import CPU, tiny
from tests.unit.test_data_batches import write_shards

LENGTH = 16
FIRST_TOKEN = {"news": 1, "code": 101, "verse": 201}
"""Tokens 1 to 99 are of the news, and so on: a window that crosses a domain's end would show both."""
TOKENS = {"news": (500, 170), "code": (1300, 100), "verse": (90, 60)}
"""Training and validation tokens; none is a whole number of windows."""
DOMAINS = {name: {"corpus": name} for name in TOKENS}


def ids(name: str, count: int) -> list[int]:
    return [0 if place % 37 == 36 else FIRST_TOKEN[name] + place * 7 % 99 for place in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    counts = {
        name: shards.DomainCounts(
            corpus=name,
            train=shards.SplitCounts(tokens=train, documents=1, bytes=1),
            validation=shards.SplitCounts(tokens=held_out, documents=1, bytes=1),
        )
        for name, (train, held_out) in TOKENS.items()
    }
    train, held_out = ([token for name, pair in TOKENS.items() for token in ids(name, pair[split])] for split in (0, 1))
    return write_shards(tmp_path_factory.mktemp("domains") / "folder", train, held_out, domains=counts)


def config_with(**data: Any) -> RunConfig:
    base = {"domains": DOMAINS, "tokenizer_vocab_size": 600, "sequence_length": LENGTH, "global_batch_sequences": 8}
    return tiny(data={**base, **data}, model={"vocab_size": 600}, validation={"max_sequences": 12})


def source_of(folder: Path, **data: Any) -> TokenSource:
    return TokenSource(folder, config_with(**data).data, seed=3)


def domain_of(row: torch.Tensor) -> str:
    """The domain of a sequence; fails when it shows two."""
    (name,) = {min(FIRST_TOKEN, key=lambda n: (token - FIRST_TOKEN[n]) % 1000) for token in row.tolist() if token}
    return name


PER_NODE = [{"news": 1}, {"code": 3, "verse": 1}]
MIXTURES: dict[str, dict[str, Any]] = {
    "size": {},
    "weights": {"domains": {n: {"corpus": n, "weight": w} for n, w in (("news", 1), ("code", 1), ("verse", 2))}},
    "per node": {"per_node": PER_NODE},
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_no_window_crosses_the_end_of_a_domain(mixture: str, folder: Path) -> None:
    source = source_of(folder, **MIXTURES[mixture])
    for step in range(1, 120):
        tokens, targets = source.train_batch(step, 0, 1)
        for row in torch.cat([tokens, targets[:, -1:]], 1):
            domain_of(row)


def test_by_size_an_epoch_is_every_window_of_every_domain(folder: Path) -> None:
    source = source_of(folder, global_batch_sequences=2)
    sequences = {name: (train - 1) // LENGTH for name, (train, _) in TOKENS.items()}
    assert sum(sequences.values()) % 2 == 1  # so the last step begins the next epoch
    steps = range(1, sum(sequences.values()) // 2 + 1)
    rows = [row for step in steps for part in range(2) for row in source.train_batch(step, part, 2)[0]]
    expected = [
        tuple(ids(name, pair[0])[window * LENGTH : (window + 1) * LENGTH])
        for name, pair in TOKENS.items()
        for window in range(sequences[name])
    ]
    assert not Counter(tuple(row.tolist()) for row in rows) - Counter(expected)
    assert len(rows) == len(expected) - 1


def test_each_step_has_the_shares_of_its_weights_and_each_node_its_own_mixture(folder: Path) -> None:
    weighted, apart = (source_of(folder, **MIXTURES[name]) for name in ("weights", "per node"))
    for step in range(1, 40):
        counts = Counter(map(domain_of, weighted.train_batch(step, 0, 1)[0]))
        assert counts == {"verse": 4, "news": 2, "code": 2}
        assert Counter(map(domain_of, apart.train_batch(step, 0, 2)[0])) == {"news": 4}
        assert Counter(map(domain_of, apart.train_batch(step, 1, 2)[0])) == {"code": 3, "verse": 1}


METHODS: dict[str, dict[str, Any]] = {
    "spes": {},
    "dilico": {"partition": {"kind": "full"}},
    "ranks": {"parallel": {"ranks_per_node": 2}},
    "centralized": {"sync": {"exchange": "gradients"}},
    "local": {"sync": {"exchange": "none"}},
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_all_methods_read_the_same_sequences_in_every_step(mixture: str, folder: Path) -> None:
    data = config_with(**MIXTURES[mixture]).data
    source = TokenSource(folder, data, seed=3)
    for step in (1, 2, 50):
        read = []
        for changes in METHODS.values():
            config = tiny(method="spes", **changes)
            places = [Place.of(config, n, r) for n, r in processes(config)]
            rows = [row for at in places for row in source.train_batch(step, at.part, at.parts)[0].tolist()]
            read.append(sorted(rows))
        assert all(rows == read[0] for rows in read)


def processes(config: RunConfig) -> list[tuple[int, int]]:
    """(node, rank) of every process of a run, as `node.run_node` has them."""
    if config.sync.exchange == "gradients":
        return [(0, rank) for rank in range(config.world_size)]
    return [(node, rank) for node in range(config.nodes) for rank in range(config.parallel.ranks_per_node)]


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("limit", [3, 8, 1000])
def test_parts_cover_the_same_held_out_sequences_of_each_domain(parts: int, limit: int, folder: Path) -> None:
    source = source_of(folder)
    dealt = [source.validation_batches(part, parts, 2, limit) for part in range(parts)]
    forms = [[(tuple(batch.tokens.shape), batch.domain) for batch in batches] for batches in dealt]
    assert all(form == forms[0] for form in forms)
    found = sorted(row for batches in dealt for batch in batches for row in real_rows(batch))
    assert found == sorted(row for batch in source.validation_batches(0, 1, 100, limit) for row in real_rows(batch))
    available = {name: (held_out - 1) // LENGTH for name, (_, held_out) in TOKENS.items()}
    assert Counter(name for name, _ in found) == even_shares(limit, available)


def real_rows(batch: ValidationBatch) -> list[tuple[str, list[int]]]:
    """The sequences of a batch without those that fill it up; each is of the batch's domain."""
    rows = batch.tokens[(batch.targets != IGNORED_TARGET).any(1)]
    assert {domain_of(row) for row in rows} <= {batch.domain}
    return [(batch.domain, row.tolist()) for row in rows]


@pytest.mark.parametrize(
    ("total", "available", "expected"),
    [
        (10, (100, 100, 100), (4, 3, 3)),
        (10, (1, 100, 100), (1, 5, 4)),
        (10, (100, 100, 1), (5, 4, 1)),
        (10, (2, 0, 3), (2, 0, 3)),
        (1, (5, 5, 5), (1, 0, 0)),
        (0, (5, 5, 5), (0, 0, 0)),
    ],
)
def test_what_one_domain_lacks_the_others_give(
    total: int, available: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert tuple(even_shares(total, dict(zip("abc", available, strict=True))).values()) == expected


def test_validation_events_add_up_over_domains_and_are_those_of_each_domain_alone(folder: Path, tmp_path: Path) -> None:
    config = replace(config_with(), nodes=1, budget_tokens=LENGTH * 8)
    decoder, source = build_decoder(config, range(4), CPU), source_of(folder)
    events = EventWriter(tmp_path / "node-0.jsonl")
    Training(config, decoder, source, events, Place(0, 1, 0, 1), exchange=None, device=CPU).run()
    (event,) = [event for event in read_events(tmp_path / "node-0.jsonl") if event["kind"] == "validation"]
    assert list(event["domains"]) == list(TOKENS)
    for field in ("loss_sum_nats", "target_tokens", "target_bytes"):
        assert event[field] == pytest.approx(sum(domain[field] for domain in event["domains"].values()))
    batches = source.validation_batches(0, 1, 100, 12)
    for batch in batches:
        decoder.eval()
        mean = float(decoder(batch.tokens, batch.targets, config.loss).cross_entropy)
        told = event["domains"][batch.domain]
        assert told["loss_sum_nats"] == pytest.approx(mean * told["target_tokens"], rel=1e-5)
        assert told["target_bytes"] == batch.target_bytes
    assert validate(decoder, batches, config.loss, CPU).keys() == TOKENS.keys()


def test_a_folder_of_other_domains_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"has the domains \['news', 'code', 'verse'\], but data.domains names \[\]"):
        TokenSource(folder, DataConfig(tokenizer_vocab_size=600), seed=0)


def test_a_domain_too_small_for_its_share_or_for_one_sequence_is_named(folder: Path) -> None:
    header = shards.read_header(folder)
    shards.require_enough(header, config_with())
    with pytest.raises(ConfigError) as caught:
        shards.require_enough(header, config_with(sequence_length=64, global_batch_sequences=4))
    assert {problem.path for problem in caught.value.problems} == {"data.domains.verse"}
    assert "has no validation sequence" in str(caught.value)
    with pytest.raises(ConfigError, match=r"verse gives 5 training .* fewer than the 6 that one step takes"):
        shards.require_enough(header, config_with(per_node=[{"verse": 1}, {"news": 1, "code": 1, "verse": 2}]))


def problems_of(data: dict[str, Any], nodes: int = 2) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        from_dict({"nodes": nodes, "data": data})
    return {problem.path: problem.message for problem in caught.value.problems}


WEIGHED = {"a": {"corpus": "x", "weight": 1}, "b": {"corpus": "y", "weight": 0}}


@pytest.mark.parametrize(
    ("data", "path", "words"),
    [
        ({"per_node": [{"a": 1}, {"a": 1}]}, "data.per_node", "must be empty without data.domains"),
        ({"domains": WEIGHED | {"c": {"corpus": "z"}}}, "data.domains.c.weight", "(null) must be given where other"),
        ({"domains": WEIGHED | {"b": {"corpus": "y", "weight": -1}}}, "data.domains.b.weight", "(-1) must be a finite"),
        ({"domains": {"b": WEIGHED["b"]}}, "data.domains", "at least one domain a weight above 0"),
        ({"domains": WEIGHED, "per_node": [{"a": 1, "b": 1}] * 2}, "data.domains.a.weight", "would be ignored"),
        ({"domains": DOMAINS, "per_node": [{"news": 1, "code": 0}]}, "data.per_node", "(1 mixtures) must give one"),
        ({"domains": DOMAINS, "per_node": [{"news": 1}, {"cod": 1}]}, "data.per_node[1]", "names cod, not among"),
        ({"domains": DOMAINS, "per_node": [{"news": 1}, {}]}, "data.per_node[1]", "at least one domain a weight"),
        ({"domains": DOMAINS, "per_node": [{"news": 1}, {"code": 1}]}, "data.domains.verse", "is read by no node"),
        ({"domains": {f"d{n}": {"corpus": "x"} for n in range(65)}}, "data.domains", "must be at most 64"),
    ],
)
def test_rules_of_mixtures_name_setting_and_next_move(data: dict[str, Any], path: str, words: str) -> None:
    assert words in problems_of(data)[path]


def test_a_domain_without_a_corpus_is_one_mistake_also_where_nodes_mix_it() -> None:
    data = {"domains": {"a": {"corpus": " "}, "b": {"corpus": "y"}}, "per_node": [{"a": 1}, {"b": 1}]}
    assert list(problems_of(data)) == ["data.domains.a.corpus"]


def test_a_domain_of_weight_zero_is_validated_on_only(folder: Path) -> None:
    per_node = [{"news": 1, "verse": 0}, {"code": 1}]
    source = source_of(folder, per_node=per_node)
    read = Counter(domain_of(row) for step in range(1, 20) for row in source.train_batch(step, 0, 1)[0])
    assert read.keys() == {"news", "code"}
    assert {batch.domain for batch in source.validation_batches(0, 1, 8, 12)} == TOKENS.keys()


def test_identity_holds_the_mixture_and_nothing_new_where_there_is_none() -> None:
    plain = tiny()
    # As it was before there were domains and document_attention.
    assert digest(plain) == "d62cc154eb0fd3a99bb16b703c976564c78a726fa5ce71adbfa8396a5398f4bc"
    mixed = config_with()
    assert digest(mixed) != digest(plain)
    assert digest(mixed) == digest(config_with(corpus="not read"))
    assert digest(mixed) != digest(config_with(per_node=[{"news": 1}, {"code": 1, "verse": 1}]))
    separate = tiny(data={**{"tokenizer_vocab_size": 300}, "document_attention": "separate"})
    assert digest(separate) != digest(plain)
