"""A tokenizer that was made elsewhere, from files in Hugging Face format: what ends a text, what each id stands for.

Two families are read: byte-level ones, whose tokens spell bytes, and those in the style of sentencepiece, whose tokens
spell text with a mark for a space. Of others the bytes of a token cannot be told, and so no bits per byte.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spes_core.data import shards
from spes_core.data.vocabulary import END_OF_TEXT, Vocabulary, byte_characters
from spes_core.errors import DataError
from spes_core.filedigest import file_digest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_SIDE_FILES = (*_CONFIGS, "chat_template.jinja", "added_tokens.json")
_SOURCES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "sentencepiece.bpe.model")
_USUAL_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[EOS]")
_MOST_IDS = 1 << 24
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def identity(given: str) -> str:
    """SHA-256 (hex) of the files that the tokenizer at a path consists of. Raises DataError when there is none."""
    digest = hashlib.sha256()
    for path in _files(given):
        digest.update(f"{path.name} {file_digest(path)}\n".encode())
    return digest.hexdigest()


def read(given: str) -> Vocabulary:
    """The tokenizer at a path: a folder with tokenizer.json (or what transformers reads), or such a file.

    Raises DataError naming data.tokenizer when it cannot be used.
    """
    files = _files(given)
    tokenizer = _load(given, files)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if not 0 < size <= _MOST_IDS:
        raise DataError(f"{_shown(given)} has {size} ids; give a tokenizer with 1 to {_MOST_IDS} of them")
    end = _end_of_text(given, files, tokenizer)
    return Vocabulary(
        tokenizer=tokenizer,
        size=size,
        end_of_text_id=end,
        reserved=_reserved(tokenizer, end),
        token_bytes=_token_bytes(given, tokenizer, size, end),
        files=tuple(path for path in files if path.name in (shards.TOKENIZER, *_SIDE_FILES)),
    )


def _shown(given: str) -> str:
    return f'data.tokenizer ("{given}")'


def _files(given: str) -> tuple[Path, ...]:
    """The files that decide what the tokenizer does, in a fixed order."""
    path = Path(given).expanduser()
    if path.is_file():
        return (path,)
    if path.is_dir():
        names: tuple[str, ...] = (shards.TOKENIZER, *_SIDE_FILES, shards.HEADER)
        if not (path / shards.TOKENIZER).is_file():
            names = (*_SOURCES, *_SIDE_FILES)
        if found := tuple(path / name for name in names if (path / name).is_file()):
            return found
        raise DataError(f"{_shown(given)} holds no tokenizer; give a folder with tokenizer.json, or bpe, or bytes")
    raise DataError(
        f"{_shown(given)} must be bpe, bytes, or a folder with a Hugging Face tokenizer; there is no such folder"
    )


def _load(given: str, files: tuple[Path, ...]) -> Tokenizer:
    try:
        if files[0].suffix == ".json" and files[0].name not in ("vocab.json", *_SIDE_FILES):
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(files[0]))
        import transformers

        path, options = files[0].parent, {"gguf_file": files[0].name} if files[0].suffix == ".gguf" else {}
        loaded: Any = transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, **options
        )
        tokenizer: Tokenizer = loaded.backend_tokenizer
        if loaded.eos_token is not None:
            tokenizer.add_special_tokens([loaded.eos_token])
        return tokenizer
    except Exception as error:
        # tokenizers and transformers raise many types for files that they cannot read.
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{_shown(given)} cannot be read ({reason}); give a folder with tokenizer.json, or bpe, or bytes"
        ) from error


def _end_of_text(given: str, files: tuple[Path, ...], tokenizer: Tokenizer) -> int:
    """The id that ends a document: what the folder names as its eos_token, or else a usual name of one."""
    for path in files:
        token = _named_end(path)
        if isinstance(token, int) and tokenizer.id_to_token(token) is not None:
            return token
        if isinstance(token, str) and (index := tokenizer.token_to_id(token)) is not None:
            return int(index)
    special = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items()) if token.special]
    for usual in _USUAL_ENDS:
        if usual in special and (index := tokenizer.token_to_id(usual)) is not None:
            return int(index)
    shown = ", ".join(special[:8]) or "none"
    raise DataError(
        f"{_shown(given)} names no end of text (its special tokens: {shown}); name one as eos_token in a"
        " tokenizer_config.json beside its tokenizer.json"
    )


def _reserved(tokenizer: Tokenizer, end: int) -> str | None:
    """The end of text as text, when the tokenizer reads it out of text although it is told not to."""
    token = tokenizer.id_to_token(end)
    ids = tokenizer.encode(f"{token} a {token}", add_special_tokens=False).ids
    return str(token) if end in ids else None


def _named_end(path: Path) -> str | int | None:
    """The eos_token that a file of the folder names; of a tokenized corpus its id."""
    if path.name not in (*_CONFIGS, shards.HEADER):
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    if path.name == shards.HEADER:
        index = content.get("end_of_text_id")
        return index if isinstance(index, int) else None
    token = content.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _token_bytes(given: str, tokenizer: Tokenizer, size: int, end: int) -> array[int]:
    """Bytes of text of each id. Special tokens stand for no text: text never becomes one.

    Where the tokenizer sets a space before a text, that space counts too: one byte a document.
    """
    spec = json.loads(tokenizer.to_str())
    parts = list(_parts([spec.get("decoder"), spec.get("pre_tokenizer"), spec.get("normalizer")]))
    types = {part["type"] for part in parts}
    if not types & {"ByteLevel", "Metaspace", "ByteFallback"}:
        raise DataError(
            f"{_shown(given)} does not say which bytes its tokens stand for ({', '.join(sorted(types)) or 'nothing'});"
            " give a byte-level tokenizer or one in the style of sentencepiece"
        )
    mark = next((part["replacement"] for part in parts if part["type"] == "Metaspace"), "▁")
    alphabet = set(byte_characters()) if "ByteLevel" in types else None
    added = {token["id"]: token for token in spec["added_tokens"]}
    lengths = array("I", bytes(4 * size))
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        if alphabet is None and _BYTE.fullmatch(token):
            lengths[index] = 1
            continue
        if index == end or (index in added and added[index]["special"]):
            continue
        if index in added:
            lengths[index] = len(token.encode())
        elif alphabet is not None:
            lengths[index] = len(token) if alphabet.issuperset(token) else len(token.encode())
        else:
            lengths[index] = len(token.replace(mark, " ").encode())
    return lengths


def _parts(found: Any) -> Iterator[dict[str, Any]]:
    """Every mapping with a type, at any depth."""
    if isinstance(found, dict):
        if isinstance(found.get("type"), str):
            yield found
        found = list(found.values())
    if isinstance(found, list):
        for item in found:
            yield from _parts(item)
