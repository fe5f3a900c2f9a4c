"""The byte-level BPE that turns text into token ids and back (Sennrich et al. 2016, on the bytes of UTF-8).

Id 0 is ``<|endoftext|>``, ids 1 to 256 are the bytes, the rest are merges. Any text survives encoding and decoding;
text that happens to spell ``<|endoftext|>`` is ordinary text, so only document ends have id 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from spes_core.data import shards

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of ``vocab_size`` ids, or fewer when the texts have too few different words. Deterministic."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer=trainer)
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    tokenizer.encode_special_tokens = True
    return tokenizer


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a tokenized folder."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / shards.TOKENIZER))
    tokenizer.encode_special_tokens = True  # not stored in the file
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> array[int]:
    """Bytes of text of each id; 0 for the end of text. The byte-level alphabet has one character a byte."""
    lengths = array("I", bytes(4 * tokenizer.get_vocab_size()))
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = 0 if index == END_OF_TEXT_ID else len(token)
    return lengths
