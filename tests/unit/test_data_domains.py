"""Several corpora become one folder: one vocabulary, the domains one after another, and no leak between any two."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from spes_core.config import DataConfig, DomainConfig, RunConfig
from spes_core.data import shards, survey, tokenize
from spes_core.data.preparation import Preparation
from spes_core.data.sources import find, is_held_out
from spes_core.errors import DataError
from spes_core.rules import check
from tests.small_corpora import contents, documents_in, texts, write_rows
from workbench import verify
from workbench.corpora import find_corpus, prepare_corpus
from workbench.errors import StudyError
from workbench.spec import read_study
from workbench.trials import Corpus, expand, identity

FRACTION = 0.2


def config_of(vocab_size: int = 300, **corpora: Path | str) -> DataConfig:
    domains = {name: DomainConfig(corpus=str(corpus)) for name, corpus in corpora.items()}
    return DataConfig(domains=domains, tokenizer_vocab_size=vocab_size, validation_fraction=FRACTION)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("corpora")
    return {name: write_rows(root / f"{name}.jsonl", texts(60, seed)) for seed, name in enumerate(("z", "a", "m"))}


@pytest.fixture(scope="module")
def folder(corpora: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenize.prepare(config_of(**corpora), tmp_path_factory.mktemp("cache"))


def decoded(folder: Path, name: str) -> list[str]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in documents_in(folder / name)]


def test_the_files_hold_the_domains_one_after_another_in_the_order_given(folder: Path) -> None:
    for name, held_out in (("train.bin", False), ("validation.bin", True)):
        expected = [
            text
            for seed, domain in enumerate(("z", "a", "m"))
            for n, text in enumerate(texts(60, seed))
            if is_held_out(f"{domain}.jsonl:d{n}", FRACTION) == held_out
        ]
        assert decoded(folder, name) == expected


def test_the_header_counts_each_domain_and_the_parts_add_up(folder: Path, corpora: dict[str, Path]) -> None:
    header = shards.verify(folder)
    assert list(header.domains) == ["z", "a", "m"]
    assert [domain.corpus for domain in header.domains.values()] == [str(path) for path in corpora.values()]
    for name, split in (("train", header.train), ("validation", header.validation)):
        parts = [getattr(domain, name) for domain in header.domains.values()]
        for size in ("tokens", "documents", "bytes"):
            assert sum(getattr(part, size) for part in parts) == getattr(split, size)
        start, documents = 0, documents_in(folder / f"{name}.bin")
        for part in parts:
            mine = documents[start : start + part.documents]
            assert sum(len(ids) + 1 for ids in mine) == part.tokens
            start += part.documents


def test_a_domain_splits_as_it_does_alone(folder: Path, corpora: dict[str, Path], tmp_path: Path) -> None:
    alone = DataConfig(corpus=str(corpora["a"]), tokenizer_vocab_size=300, validation_fraction=FRACTION)
    header = shards.read_header(tokenize.prepare(alone, tmp_path))
    part = shards.read_header(folder).domains["a"]
    assert (part.train.bytes, part.validation.bytes) == (header.train.bytes, header.validation.bytes)
    assert header.domains == {}


def test_no_domain_trains_on_a_text_that_another_holds_out(tmp_path: Path) -> None:
    first, second = texts(60, 1), texts(60, 2)
    held_out = [n for n in range(60) if is_held_out(f"first.jsonl:d{n}", FRACTION)]
    second += [first[n] for n in held_out]  # after and before the domain that holds them out
    write_rows(tmp_path / "first.jsonl", first)
    write_rows(tmp_path / "second.jsonl", second)
    copies = [n for n in range(60, len(second)) if not is_held_out(f"second.jsonl:d{n}", FRACTION)]
    assert len(copies) >= 3
    for order in (("first", "second"), ("second", "first")):
        config = config_of(**{name: tmp_path / f"{name}.jsonl" for name in order})
        made = tokenize.prepare(config, tmp_path / "cache")
        assert not set(decoded(made, "train.bin")) & set(decoded(made, "validation.bin"))
        skipped = shards.read_header(made).skipped_first["with the text of a validation document"]
        assert set(skipped) <= {f"second: second.jsonl:d{n}" for n in copies} and skipped


def test_the_vocabulary_is_trained_on_each_domain_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "SAMPLE_BYTES", 60_000)
    domains = {"large": ("alpha beta", 900), "small": ("gamma delta", 300)}
    rows = {name: [f"{word} {n} " * 20 for n in range(count)] for name, (word, count) in domains.items()}
    paths = {name: write_rows(tmp_path / f"{name}.jsonl", texts) for name, texts in rows.items()}
    sample = survey.survey(Preparation.of(config_of(**paths)).find()).sample
    share = sum(len(text) for text in sample if "gamma" in text) / sum(map(len, sample))
    assert 0.2 < share < 0.32  # the small domain has 26 % of the text


@pytest.mark.parametrize("name", ["order", "name", "corpus", "fraction"])
def test_all_that_decides_the_tokens_has_its_own_folder_and_weights_do_not(
    corpora: dict[str, Path], name: str, tmp_path: Path
) -> None:
    config = config_of(**corpora)
    reverse = dict(reversed(config.domains.items()))
    changed = {
        "order": replace(config, domains=reverse),
        "name": replace(config, domains={"renamed" if key == "a" else key: d for key, d in config.domains.items()}),
        "corpus": config_of(**(corpora | {"a": corpora["m"]})),
        "fraction": replace(config, validation_fraction=0.3),
    }[name]
    weighted = {key: replace(domain, weight=2.0) for key, domain in config.domains.items()}
    key = Preparation.of(config).find().key
    assert Preparation.of(changed).find().key != key
    assert Preparation.of(replace(config, domains=weighted, corpus="absent")).find().key == key
    made = tokenize.find_prepared(config, tmp_path)
    assert made is None


def test_a_domain_that_cannot_be_used_is_named(corpora: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'^data\.domains\.b\.corpus \("/no/such"\) does not exist'):
        tokenize.prepare(config_of(**corpora, b="/no/such"), tmp_path / "cache")
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"body": 1}\n')
    with pytest.raises(DataError, match=r"data\.domains\.b\.corpus .* has no usable document; .*\(b: empty\.jsonl:1\)"):
        tokenize.prepare(config_of(**corpora, b=empty), tmp_path / "cache")
    rows = write_rows(tmp_path / "first.jsonl", [f"text {n}" for n in range(40)])
    held_out = [f"text {n}" for n in range(40) if is_held_out(f"first.jsonl:d{n}", FRACTION)]
    copies = write_rows(tmp_path / "copies.jsonl", held_out * 10)
    with pytest.raises(DataError, match=r"data\.domains\.copies\.corpus .* has no training document.*not trained on"):
        tokenize.prepare(config_of(first=rows, copies=copies), tmp_path / "cache")
    assert [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()] == []


def test_the_command_makes_the_same_folder(
    folder: Path, corpora: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    domains = [word for name, path in corpora.items() for word in ("--domain", f"{name}={path}")]
    sizes = ["--vocab-size", "300", "--validation-fraction", str(FRACTION), "--cache", str(tmp_path)]
    assert tokenize.main([*domains, *sizes]) == 0
    assert contents(Path(capsys.readouterr().out.splitlines()[-1])) == contents(folder)
    with pytest.raises(SystemExit):
        tokenize.main(["--domain", "nameless"])
    assert "must be NAME=SOURCE" in capsys.readouterr().err


def test_a_study_prepares_a_mixture_in_a_process_of_its_own(
    corpora: dict[str, Path], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = config_of(**corpora)
    asked = Corpus.of(config)
    assert asked == Corpus.of(replace(config, corpus="elsewhere"))
    assert find_corpus(asked) is None
    prepared = prepare_corpus(asked)
    assert contents(prepared.folder) == contents(folder)
    assert find_corpus(asked) == prepared
    other = replace(config, tokenizer="bytes", text_field="text", max_repetition=0.9)
    assert prepare_corpus(Corpus.of(other)).header.tokenizer == "bytes"
    assert find_corpus(Corpus.of(replace(other, max_repetition=None))) is None


def test_where_a_domain_ends_is_part_of_the_digest(tmp_path: Path) -> None:
    names = ["abc", "bisect", "calendar", "cmd", "code", "dis", "enum", "fractions", "glob", "heapq", "inspect", "json"]
    digests = []
    for cut in (5, 7):
        sources = {name: f"stdlib:{','.join(f'{n}*' for n in part)}" for name, part in
                   (("x", names[:cut]), ("y", names[cut:]))}  # fmt: skip
        domains = {name: DomainConfig(corpus=source) for name, source in sources.items()}
        config = DataConfig(domains=domains, tokenizer="bytes", tokenizer_vocab_size=257, validation_fraction=0.4)
        folder = tokenize.prepare(config, tmp_path)
        digests.append((shards.verify(folder).digest, (folder / "train.bin").read_bytes()))
    assert digests[0][1] == digests[1][1]  # the same texts in the same order
    assert digests[0][0] != digests[1][0]


def test_where_domains_lie_is_no_part_of_a_trial_s_identity_and_weights_are(corpora: dict[str, Path]) -> None:
    run = RunConfig(data=config_of(**corpora))

    def changed(**settings: Any) -> bool:
        return identity(replace(run, data=replace(run.data, **settings)), "digest") != identity(run, "digest")

    moved = {name: replace(domain, corpus="/elsewhere") for name, domain in run.data.domains.items()}
    weighted = {name: replace(domain, weight=1.0) for name, domain in run.data.domains.items()}
    assert not changed(domains=moved)
    assert not changed(corpus="/elsewhere")
    assert not changed(tokenizer="/a/folder", text_field="body", max_repetition=0.1)
    assert changed(domains=weighted)
    assert changed(domains={})


def test_verify_finds_domains_that_have_moved() -> None:
    data = config_of(a="x", b="y")
    moved = verify._data_at(data, ["b=/new=place"])
    assert [domain.corpus for domain in moved.domains.values()] == ["x", "/new=place"]
    assert verify._data_at(DataConfig(), ["/p=q"]).corpus == "/p=q"
    for place in ("/new", "c=/new"):
        with pytest.raises(StudyError, match=r"must be NAME=PATH, where NAME is a domain of the trial \(a, b\)"):
            verify._data_at(data, [place])


def test_a_study_file_names_domains_and_their_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "mixture.yaml"
    path.write_text(
        "schema: 1\nname: mixture\nquestion: Why?\ndefaults: [model/tiny, data/default, launcher/local]\n"
        "run:\n  data:\n    domains:\n      code: {corpus: stdlib, weight: 1}\n"
        "      wiki: {corpus: wiki.jsonl, weight: 2}\n"
        "arms: {spes: {method: spes}}\n"
    )
    (variant,) = expand(read_study(path))
    assert variant.config.data.domains["wiki"] == DomainConfig(corpus="wiki.jsonl", weight=2.0)
    assert Corpus.of(variant.config.data).path == "code, wiki"
    with pytest.raises(StudyError, match=r"data\.domains\.wiki\.corpsu is not a setting; did you mean .corpus"):
        expand(read_study(path, ["+run.data.domains.wiki.corpsu=x"]))
    good = path.read_text()
    for wrong in ("weight: nan", "wieght: 1"):
        path.write_text(good.replace("weight: 2", wrong))
        with pytest.raises(StudyError) as told:
            expand(read_study(path))
        assert len(told.value.mistakes) == 1 and f"wiki.{wrong.partition(':')[0]}" in told.value.mistakes[0]
    path.write_text(
        good.replace("code: {corpus: stdlib, weight: 1}", '"c/d": {corpus: x, weight: 1}').replace(
            "wiki: {corpus: wiki.jsonl,", "a.b: {corpus: x}\n      ü: {corpus: x, weight: 1}\n      wiki: {"
        )
    )
    assert [line.partition("mixture.yaml:")[2] for line in read_study(path).mistakes] == [
        "9: run.data.domains.a.b is not a setting; valid names: corpus, weight",
        "9: run.data.domains.a.corpus is missing",
        "11: run.data.domains.wiki.corpus is missing",
    ]
    path.write_text(path.read_text().replace("a.b:", "ab:").replace("wiki: {", "wiki: {corpus: x,"))
    with pytest.raises(StudyError) as told:
        expand(read_study(path))
    assert [line.partition(" must ")[0].partition("mixture.yaml:")[2] for line in told.value.mistakes] == [
        "8: run.data.domains.c/d",
        "10: run.data.domains.ü",
    ]


def test_a_pattern_names_several_files_in_order(tmp_path: Path) -> None:
    for name in ("wiki.train-01", "wiki.train-00", "wiki.val", ".wiki.train-02"):
        write_rows(tmp_path / f"{name}.jsonl", [name])
    corpus = find(str(tmp_path / "wiki.train-*.jsonl"))
    assert corpus.files == ("wiki.train-00.jsonl", "wiki.train-01.jsonl")
    with pytest.raises(DataError, match=r"data\.corpus \(.*\) matches no file"):
        find(str(tmp_path / "novels-*.jsonl"))


def test_domains_of_the_shared_text_become_one_folder(shared_data: Path, tmp_path: Path) -> None:
    for name in ("factbook", "tinystories"):
        shutil.copy(shared_data / "text" / f"{name}.val.jsonl.gz", tmp_path / f"{name}.jsonl.gz")
    config = config_of(1024, **{name: tmp_path / f"{name}.jsonl.gz" for name in ("factbook", "tinystories")})
    header = shards.verify(tokenize.prepare(config, tmp_path / "cache"))
    assert [d.train.documents + d.validation.documents for d in header.domains.values()] == [8, 984]


def test_names_that_no_metric_could_carry_are_refused() -> None:
    domains = {name: DomainConfig(corpus="x") for name in ("a b", "a.b", "..", "", "d\ne", "-e", "f" * 81)}
    data = DataConfig(domains={**domains, "c": DomainConfig(corpus=" ")}, tokenizer=" ")
    problems = check(RunConfig(data=data))
    assert not any("\n" in str(problem) for problem in problems)
    assert [problem.path for problem in problems] == [
        *(f"data.domains.{name}" for name in domains),
        "data.domains.c.corpus",
        "data.tokenizer",
    ]
