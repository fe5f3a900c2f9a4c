"""The order in which training sequences are read: a pure function of (seed, position), with no stored shuffle.

Position 0, 1, 2, ... counts the sequences that all nodes together have read since the start of the run. Each epoch
(``num_samples`` positions) is one pseudo-random permutation of the samples, so one integer resumes a run, and nodes
that join, leave or restart change nothing for the others. `mixture` makes the order of several domains out of it.

The permutation is a balanced Feistel network (Luby and Rackoff 1988), which is a bijection whatever its round
function, narrowed from a power of four to ``num_samples`` by cycle walking (Black and Rogaway 2002).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache


def sample_index(seed: int | str, position: int, num_samples: int) -> int:
    """The sample (0 <= sample < num_samples) that stands at ``position`` >= 0 of the endless order of ``seed``."""
    assert num_samples >= 1 and position >= 0
    epoch, index = divmod(position, num_samples)
    keys = _round_keys(seed, epoch)
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    # At most three in four values of the network's domain are outside; following the cycle leads back inside.
    while (index := _permute(index, half_bits, keys)) >= num_samples:
        pass
    return index


def positions(step: int, part: int, parts: int, global_batch_sequences: int) -> range:
    """Positions that ``part`` of ``parts`` reads in optimizer step ``step`` (counted from 1).

    The parts' ranges are disjoint, of equal length, and together the global batch; ``parts`` divides it.
    """
    assert step >= 1 and 0 <= part < parts and global_batch_sequences % parts == 0
    size = global_batch_sequences // parts
    start = (step - 1) * global_batch_sequences + part * size
    return range(start, start + size)


@lru_cache(maxsize=256)
def _round_keys(seed: int | str, epoch: int) -> tuple[int, ...]:
    """Eight round keys of 32 bits."""
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    return tuple(int.from_bytes(digest[start : start + 4], "little") for start in range(0, 32, 4))


def _permute(index: int, half_bits: int, keys: tuple[int, ...]) -> int:
    """A bijection of the integers below 4**half_bits."""
    mask = (1 << half_bits) - 1
    left, right = index >> half_bits, index & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + (key << 32)) & mask)
    return left << half_bits | right


def _mix(value: int) -> int:
    """The 64-bit finaliser of SplitMix64 (Steele, Lea and Flood 2014): every input bit reaches every output bit."""
    value = (value * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31
