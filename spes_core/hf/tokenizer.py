"""The tokenizer of an exported model: the corpus's own, or another model's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spes_core.data import shards, vocabulary
from spes_core.errors import DataError


def read_tokenizer(path: Path) -> Any:
    """The transformers tokenizer of a tokenized corpus, a folder in Hugging Face format, or a GGUF file.

    A corpus's tokenizer starts and ends documents with ``<|endoftext|>`` but never reads it out of text: what spells it
    is ordinary text, as in training (spes_core.data.vocabulary). Raises DataError.
    """
    import transformers

    try:
        if (path / shards.HEADER).exists():
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
