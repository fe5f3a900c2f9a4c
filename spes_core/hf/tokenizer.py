"""The tokenizer of an exported model: the corpus's own, or another model's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spes_core.data import given, shards, vocabulary
from spes_core.data.preparation import MADE_HERE
from spes_core.errors import DataError


def read_tokenizer(path: Path) -> Any:
    """The transformers tokenizer of a tokenized corpus, a folder in Hugging Face format, or a GGUF file.

    A corpus's own tokenizer (trained on it, or its bytes) starts and ends documents with ``<|endoftext|>`` but never
    reads it out of text: what spells it is ordinary text, as in training (spes_core.data.vocabulary). One that the
    corpus was given comes as it was given, with the end of text that the corpus has. Raises DataError.
    """
    import transformers

    try:
        if (path / shards.HEADER).exists():
            header = shards.read_header(path)
            if header.tokenizer not in MADE_HERE:
                return _given(path, header.end_of_text_id)
            fast: Any = transformers.PreTrainedTokenizerFast
            return fast(
                tokenizer_object=vocabulary.load(path),
                bos_token=vocabulary.END_OF_TEXT,
                eos_token=vocabulary.END_OF_TEXT,
                pad_token=vocabulary.END_OF_TEXT,
                split_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
        if path.suffix == ".gguf":
            return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        if path.is_dir():
            return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # tokenizers and transformers raise many types for files that they cannot read.
        raise DataError(f"{path} holds no tokenizer that can be read: {' '.join(str(error).split())[:300]}") from error
    raise DataError(f"{path} is no folder with a tokenizer: neither a tokenized corpus nor in Hugging Face format")


def tokenizer_settings(path: Path) -> dict[str, Any] | None:
    """Settings by which a run reads text as the model at a path does; None when it has no tokenizer for that."""
    try:
        found = given.read(str(path))
    except DataError:
        return None
    return {"tokenizer": str(path.absolute()), "tokenizer_vocab_size": found.size}


def _given(path: Path, end_of_text_id: int) -> Any:
    import transformers

    if (path / "tokenizer_config.json").exists():
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    else:
        fast: Any = transformers.PreTrainedTokenizerFast
        tokenizer = fast(tokenizer_file=str(path / shards.TOKENIZER), clean_up_tokenization_spaces=False)
    if tokenizer.eos_token_id != end_of_text_id:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end_of_text_id)
    return tokenizer
