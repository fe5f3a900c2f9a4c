"""What a folder of tokenized text is made of: the settings that decide its tokens, and the corpora that they name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from spes_core.config import DataConfig
from spes_core.data import given, shards
from spes_core.data.documents import Document, Skipped
from spes_core.data.progress import Progress
from spes_core.data.repetition import repetition
from spes_core.data.sources import Corpus, find

MADE_HERE = ("bpe", "bytes")


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One part of what is tokenized; an undivided corpus is a single domain without a name."""

    name: str
    setting: str
    """Path of the setting that names its sources."""
    sources: tuple[str, ...]
    """As data.corpus each."""

    @property
    def shown(self) -> str:
        """The setting and what it says, for an error."""
        return f'{self.setting} ("{", ".join(self.sources)}")'


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Everything that decides the tokens of a folder."""

    domains: tuple[Domain, ...]
    """In the order of the files."""
    divided: bool
    """Whether the header counts the domains; a single corpus is not divided."""
    tokenizer: str
    vocab_size: int
    validation_fraction: float
    text_field: str = "text"
    """Field of a row that holds its text."""
    max_repetition: float | None = None
    """See data.max_repetition."""

    @classmethod
    def of(cls, config: DataConfig) -> Preparation:
        """What a run reads."""
        domains = [
            Domain(name=name, setting=f"data.domains.{name}.corpus", sources=(domain.corpus,))
            for name, domain in config.domains.items()
        ] or [Domain(name="", setting="data.corpus", sources=(config.corpus,))]
        return cls(
            domains=tuple(domains),
            divided=bool(config.domains),
            tokenizer=config.tokenizer,
            vocab_size=config.tokenizer_vocab_size,
            validation_fraction=config.validation_fraction,
            text_field=config.text_field,
            max_repetition=config.max_repetition,
        )

    @property
    def name(self) -> str:
        """What is read, in words."""
        return ", ".join(domain.name if self.divided else ", ".join(domain.sources) for domain in self.domains)

    def find(self) -> FoundCorpora:
        """The corpora, which exist. Raises DataError naming the setting of one that does not."""
        found = [tuple(find(source, domain.setting) for source in domain.sources) for domain in self.domains]
        return FoundCorpora(self, tuple(found), self._key(found))

    def _key(self, found: list[tuple[Corpus, ...]]) -> str:
        """Name of the cached folder: 16 hex digits that follow from the settings and from the files that are read."""
        identities = [[corpus.identity() for corpus in sources] for sources in found]
        parts: list[object] = [shards.SCHEMA, identities[0][0], self.vocab_size, self.validation_fraction]
        if self.divided or len(identities[0]) > 1:
            parts.append([[domain.name, *found] for domain, found in zip(self.domains, identities, strict=True)])
        if self.divided:
            parts.append("the digest covers where domains end")  # folders of before are not found
        tokenizer = self.tokenizer if self.tokenizer in MADE_HERE else given.identity(self.tokenizer)
        others = {"tokenizer": tokenizer, "text_field": self.text_field, "max_repetition": self.max_repetition}
        usual = {"tokenizer": "bpe", "text_field": "text", "max_repetition": None}
        if changed := {name: value for name, value in others.items() if value != usual[name]}:
            parts.append(changed)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class FoundCorpora:
    """A preparation with the files that it reads now."""

    preparation: Preparation
    corpora: tuple[tuple[Corpus, ...], ...]
    """The sources of each domain."""
    key: str
    """Of the settings and of the files as they were found: the name of the folder in a cache."""

    def fetched(self, folder: Path, prefix: str, tell: Progress) -> FoundCorpora:
        """The same with every corpus on this machine; copies get names with ``prefix``. Raises DataError."""
        field = self.preparation.text_field
        corpora = tuple(tuple(c.fetched(folder, prefix, field, tell) for c in sources) for sources in self.corpora)
        return replace(self, corpora=corpora)

    def documents(self, domain: int, skipped: Skipped) -> Iterator[Document]:
        """Every usable document of one domain, in order."""
        asked, sources, mine = self.preparation, self.corpora[domain], self.named(domain, skipped)
        for corpus in sources:
            places = mine.within(f"{corpus.name}: ") if len(sources) > 1 else mine
            for document in corpus.documents(places, asked.text_field):
                if asked.max_repetition is not None and repetition(document.text) > asked.max_repetition:
                    places.add("that repeat themselves", document.name)
                else:
                    yield document

    def named(self, domain: int, skipped: Skipped) -> Skipped:
        """What is left out of one domain goes here: its places get the domain's name."""
        name = self.preparation.domains[domain].name
        return skipped.within(f"{name}: ") if name else skipped
