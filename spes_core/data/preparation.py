"""What a folder of tokenized text is made of: the settings that decide its tokens, and the corpora that they name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from spes_core.config import DataConfig
from spes_core.data import shards
from spes_core.data.sources import Corpus, Document, Skipped, find


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
        )

    @property
    def name(self) -> str:
        """What is read, in words."""
        return ", ".join(domain.name if self.divided else ", ".join(domain.sources) for domain in self.domains)

    def find(self) -> FoundCorpora:
        """The corpora, which exist. Raises DataError naming the setting of one that does not."""
        found = [tuple(find(source, domain.setting) for source in domain.sources) for domain in self.domains]
        return FoundCorpora(self, tuple(found))


@dataclass(frozen=True)
class FoundCorpora:
    """A preparation with the files that it reads now."""

    preparation: Preparation
    corpora: tuple[tuple[Corpus, ...], ...]
    """The sources of each domain."""

    def key(self) -> str:
        """Name of the cached folder: 16 hex digits that follow from the settings and from the corpora's files."""
        asked = self.preparation
        identities = [[corpus.identity() for corpus in sources] for sources in self.corpora]
        parts: list[object] = [shards.SCHEMA, identities[0][0], asked.vocab_size, asked.validation_fraction]
        if asked.divided or len(identities[0]) > 1:
            parts.append([[domain.name, *found] for domain, found in zip(asked.domains, identities, strict=True)])
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def documents(self, domain: int, skipped: Skipped) -> Iterator[Document]:
        """Every usable document of one domain, in order."""
        sources, mine = self.corpora[domain], self.named(domain, skipped)
        for corpus in sources:
            yield from corpus.documents(mine.within(f"{corpus.name}: ") if len(sources) > 1 else mine)

    def named(self, domain: int, skipped: Skipped) -> Skipped:
        """What is left out of one domain goes here: its places get the domain's name."""
        name = self.preparation.domains[domain].name
        return skipped.within(f"{name}: ") if name else skipped
