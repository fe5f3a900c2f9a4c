"""The settings of what is read, the `data` of a RunConfig."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DomainConfig:
    """One of several corpora that are trained on together."""

    corpus: str
    """As data.corpus."""
    weight: float | None = None
    """Share of the training sequences, relative to the other domains' weights; 0 to validate on it only. Null, then for
    all domains: every sequence of every domain once an epoch."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and in which portions."""

    corpus: str = "stdlib"
    """"stdlib" (the running interpreter's standard library); a file, folder or pattern ("wiki-*.jsonl.gz") of text
    (.txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet) or code; or a Hugging Face dataset, hf:NAME[:CONFIG[:SPLIT]]."""
    domains: dict[str, DomainConfig] = field(default_factory=dict)
    """Corpora by name, read instead of data.corpus: a mixture, validated on each."""
    per_node: tuple[dict[str, float], ...] = ()
    """One mixture a node, domain -> weight (a domain that is not named is not read); empty: every node reads all."""
    tokenizer: str = "bpe"
    """"bpe" (a byte-level BPE trained on the corpus), "bytes", or a folder with a Hugging Face tokenizer."""
    tokenizer_vocab_size: int = 4096
    """Size of the byte-level BPE that is trained on the corpus; at least 257 (256 bytes and the end of text). Of
    another tokenizer the most ids that it may have."""
    text_field: str = "text"
    """Field that holds the text, in corpora of rows."""
    max_repetition: float | None = None
    """Documents are left out in which a larger share of the text lies in runs of ten words that occurred before in the
    same document (Gopher: 0.1); null keeps all."""
    validation_fraction: float = 0.02
    """Share of the documents that is held out, chosen by a hash of the document's name."""
    sequence_length: int = 128
    """Tokens in one training sequence."""
    global_batch_sequences: int = 32
    """Sequences in one step over all nodes; a multiple of nodes × parallel.ranks_per_node."""
    document_attention: Literal["packed", "separate"] = "packed"
    """What attention sees of a sequence that several documents share: "packed", everything before, also other
    documents; "separate", the token's own document and the end of text before it, so that losses are those of each
    document alone (the first token of a document is predicted from that end of text)."""
    micro_batch_sequences: int | None = None
    """Sequences of one forward and backward pass of one process, whose gradients add up over the step; a divisor of
    its share of the global batch. Null: all at once."""
