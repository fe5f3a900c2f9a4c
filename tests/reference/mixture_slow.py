"""The mixture as a simulation: places dealt one after another from the start, with counters instead of formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction


def deal(weights: Mapping[str, float]) -> Iterator[str]:
    """Whose place 0, 1, 2, ... is. The heaviest takes a place once its count falls half a place behind its share."""
    exact = {name: Fraction(str(weight)) for name, weight in weights.items() if weight}
    names = sorted(exact, key=lambda name: (-exact[name], name))
    seen, taken = Counter[str](), Counter[str]()
    while True:
        for at, name in enumerate(names):
            seen[name] += 1  # places that reached this domain
            share = exact[name] / sum(exact[other] for other in names[at:])
            if taken[name] + Fraction(1, 2) <= share * seen[name]:
                taken[name] += 1
                yield name
                break


def steps(mixtures: Sequence[Mapping[str, float]], run: int, count: int) -> Iterator[list[list[tuple[str, int]]]]:
    """For each step and node: (domain, how many sequences of it were read before), ``run`` places, not yet shuffled."""
    streams, read = [deal(weights) for weights in mixtures], Counter[str]()
    for _ in range(count):
        nodes = []
        for stream in streams:
            places = []
            for _ in range(run):
                name = next(stream)
                places.append((name, read[name]))
                read[name] += 1
            nodes.append(places)
        yield nodes
