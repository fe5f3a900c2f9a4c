"""How much of a document repeats itself: a filter for boilerplate and loops, off unless it is asked for."""

from __future__ import annotations

WORDS = 10
"""Length of a repeated run of words, the longest n-gram of the quality rules of Rae et al. (arXiv 2112.11446, A1)."""


def repetition(text: str) -> float:
    """Share of the characters of the words that lie in a run of ten words which occurred before in the text, 0 to 1.

    The rules of Gopher drop documents above 0.10. A first occurrence does not count, overlaps count once.
    """
    words = text.split()
    seen: set[tuple[str, ...]] = set()
    repeated = covered_to = 0
    for start in range(len(words) - WORDS + 1):
        run = tuple(words[start : start + WORDS])
        if run in seen:
            first = max(start, covered_to)
            repeated += sum(map(len, words[first : start + WORDS]))
            covered_to = start + WORDS
        seen.add(run)
    return repeated / max(1, sum(map(len, words)))
