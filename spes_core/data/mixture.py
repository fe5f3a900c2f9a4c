"""Which sample of which domain each place of each step holds: a pure function, whatever the mixture.

Three cases (design, words: a domain is one of several corpora):

- *by size*, the default: one permutation over the samples of all domains, so an epoch holds each of them once.
- *weights* (``data.domains.*.weight``): domains share the places of the run by weight, and each domain is an endless
  order of its own, which begins again when all its samples were read.
- *a mixture per node* (``data.per_node``): node i holds the i-th equal run of every global batch and shares its places
  by its own weights. A domain that several nodes read is still one order: they take turns, so none reads what another
  has read before the domain begins again.

Shares are exact up to rounding at every step (`Shares`). The weighted places of a step are shuffled (within a node's
run of them), so that processes that divide the run see the same mixture. Nothing depends on how many processes share
a step, on the method, or on who is present.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from spes_core.config import DataConfig
from spes_core.data.order import positions, sample_index


class Sample(NamedTuple):
    """One training sequence."""

    domain: str
    number: int
    """0 <= number < the domain's number of samples."""


class Mixture:
    """The order of a run over the samples of its domains; a corpus that is not divided is one domain named ""."""

    def __init__(self, config: DataConfig, num_samples: Mapping[str, int], seed: int) -> None:
        """``num_samples``: each domain's samples, in file order; at least 1 where its weight is above 0."""
        self._num_samples, self._seed = dict(num_samples), seed
        self._batch = config.global_batch_sequences
        self._names = list(num_samples)
        self._ends = list(accumulate(num_samples.values()))
        self._readers = [Shares(weights) for weights in mixtures(config)]

    def samples(self, step: int, part: int, parts: int) -> list[Sample]:
        """What ``part`` of ``parts`` reads in optimizer step ``step`` (from 1), as `order.positions` divides it."""
        places = positions(step, part, parts, self._batch)
        if self._readers:
            return self._weighted(step, places)
        return [self._by_size(sample_index(self._seed, place, self._ends[-1])) for place in places]

    def _by_size(self, sample: int) -> Sample:
        at = bisect_right(self._ends, sample)
        name = self._names[at]
        return Sample(name, sample - (self._ends[at] - self._num_samples[name]))

    def _weighted(self, step: int, places: Sequence[int]) -> list[Sample]:
        run = self._batch // len(self._readers)
        before = [reader.before((step - 1) * run) for reader in self._readers]
        after = [reader.before(step * run) for reader in self._readers]
        found = []
        for place in places:
            node, offset = divmod(place - (step - 1) * self._batch, run)
            start = (step - 1) * run
            # A permutation of each run of places: its "epoch" is the step.
            shuffled = start + sample_index(f"{self._seed}/places/{node}", start + offset, run)
            name, count = self._readers[node].at(shuffled)
            # Within a step nodes take turns: all of node 0's, then all of node 1's, ...
            count += sum(of_node.get(name, 0) for of_node in after[:node])
            count += sum(of_node.get(name, 0) for of_node in before[node + 1 :])
            found.append(Sample(name, sample_index(f"{self._seed}/{name}", count, self._num_samples[name])))
        return found


class Shares:
    """Places 0, 1, 2, ... divided among domains by weight, in closed form.

    The heaviest domain takes the places at which its share of them, rounded to the nearest integer, rises by one; the
    next one takes its share of those that are left, likewise; the last one takes the rest. So of the first n places a
    domain has its share of n, to within (1 + 1/1 + 1/2 + ... + 1/(domains − 1)) / 2, for every n.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Weights are relative, and not negative; a domain of weight 0 has no place."""
        # As they are written: 0.1 is a tenth.
        exact = {name: Fraction(repr(float(weight))) for name, weight in weights.items() if weight > 0}
        assert exact
        self._names = sorted(exact, key=lambda name: (-exact[name], name))
        rests = list(accumulate(exact[name] for name in reversed(self._names)))[::-1]
        shares = [exact[name] / rest for name, rest in zip(self._names, rests, strict=True)]
        self._terms = [(2 * share.numerator, share.denominator, 2 * share.denominator) for share in shares]

    def before(self, place: int) -> dict[str, int]:
        """How many of the places below ``place`` each domain has."""
        counts = {}
        for name, (numerator, half, denominator) in zip(self._names, self._terms, strict=True):
            counts[name] = (place * numerator + half) // denominator
            place -= counts[name]
        return counts

    def at(self, place: int) -> tuple[str, int]:
        """Whose ``place`` is, and how many places it has before."""
        for name, (numerator, half, denominator) in zip(self._names, self._terms, strict=True):
            count = (place * numerator + half) // denominator
            if ((place + 1) * numerator + half) // denominator > count:
                return name, count
            place -= count
        raise AssertionError("the last domain takes every place that is left")


def mixtures(config: DataConfig) -> list[dict[str, float]]:
    """Domain -> weight, one dict for each equal run of a global batch; none where domains are read by size."""
    if config.per_node:
        return [dict(weights) for weights in config.per_node]
    weights = {name: domain.weight for name, domain in config.domains.items() if domain.weight is not None}
    return [weights] if weights else []


def shares(config: DataConfig, num_samples: Mapping[str, int]) -> dict[str, float]:
    """Domain -> its part of all training sequences of the run."""
    mixed = mixtures(config) or [dict(num_samples)]
    return {
        name: sum(weights.get(name, 0) / (sum(weights.values()) or 1) for weights in mixed) / len(mixed)
        for name in num_samples
    }
