"""What turns text into token ids: a byte-level BPE trained on the corpus, the bytes themselves, or a given tokenizer.

The trained BPE (Sennrich et al. 2016, on the bytes of UTF-8) has id 0 for ``<|endoftext|>``, ids 1 to 256 for bytes,
and merges above; "bytes" has id 0 for the end of text and byte + 1 for a byte. With any of them, text that happens to
spell a special token is ordinary text, so only document ends have the id of the end of text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from spes_core.data import shards

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
NUM_BYTE_IDS = 257


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A tokenizer as the preparation of a corpus uses it."""

    tokenizer: Tokenizer
    size: int
    """One more than the largest id."""
    end_of_text_id: int
    token_bytes: array[int]
    """Bytes of text that each id stands for; 0 for the end of text."""
    of_bytes: bool = False
    """Whether the ids are the bytes of the text: no library is needed to find them."""
    reserved: str | None = None
    """Text that the tokenizer would take for the end of text, and that no document may hold; mostly there is none."""
    files: tuple[Path, ...] = ()
    """Files of a given tokenizer that an exported model needs too, tokenizer.json among them when it has one."""

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        """Type of an id in the token files."""
        return dtype_of(self.size)

    def encode(self, texts: Sequence[str]) -> list[array[int]]:
        """The ids of each text, without an end of text. Uses all threads of the tokenizers library."""
        code = "H" if self.dtype == "uint16" else "I"
        if not self.of_bytes:
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return [array(code, encoding.ids) for encoding in encodings]
        import numpy as np

        contents = [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.dtype(code)) + 1 for text in texts]
        return [array(code, content.astype(np.dtype(code)).tobytes()) for content in contents]


def trained(texts: Iterable[str], vocab_size: int) -> Vocabulary:
    """A BPE trained on the texts."""
    return of_trained(train(texts, vocab_size))


def of_trained(tokenizer: Tokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer that `train` made."""
    return Vocabulary(
        tokenizer=tokenizer,
        size=tokenizer.get_vocab_size(),
        end_of_text_id=END_OF_TEXT_ID,
        token_bytes=token_bytes(tokenizer),
    )


def of_bytes() -> Vocabulary:
    """The vocabulary of 257 ids that needs no training, with a tokenizer that gives the same ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ids = {END_OF_TEXT: END_OF_TEXT_ID} | {character: byte + 1 for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    tokenizer.encode_special_tokens = True
    return Vocabulary(
        tokenizer=tokenizer,
        size=NUM_BYTE_IDS,
        end_of_text_id=END_OF_TEXT_ID,
        token_bytes=token_bytes(tokenizer),
        of_bytes=True,
    )


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


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (Radford et al. 2019, GPT-2).

    Printable bytes are themselves, the others are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def dtype_of(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest type that holds the ids of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"
