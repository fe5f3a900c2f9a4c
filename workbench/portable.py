"""Paths as a report may print them: without the folders of the machine that it was made on."""

from __future__ import annotations

import os
from pathlib import Path


def portable(path: str) -> str:
    """The path relative to the working directory, or only its last name when it lies outside."""
    given = Path(path)
    if not given.is_absolute() and ".." not in given.parts:
        return path
    whole = Path(os.path.normpath(Path.cwd() / given))
    return str(whole.relative_to(Path.cwd())) if whole.is_relative_to(Path.cwd()) else whole.name


def portable_word(word: str) -> str:
    """A word of a command line with its path, alone or after key=, made `portable`."""
    key, equals, value = word.rpartition("=")
    return f"{key}{equals}{portable(value)}"
