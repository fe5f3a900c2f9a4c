"""From the stored uploads of one round to the new global weights and to the bytes that tell nodes of them.

Group by group in canonical order: what each node sent becomes a value, values become one by the aggregation rule, the
outer optimizer steps, experts are merged, and the change is encoded. What is published is the *decoded* change: so the
server holds the very bits that every node will hold. A tensor that one node alone trained and nothing changed after is
not encoded again: its change is that node's upload, where it lies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import xxhash

from spes_core.config import RunConfig
from spes_core.partition import Partition
from spes_core.sharding import Group
from spes_core.sync.aggregate import BLOCK_ELEMENTS, add_to_mean, make_scratch, outer_step
from spes_core.sync.codec import Codec, Values, decode_change, encode_change
from spes_core.sync.global_state import GlobalState
from spes_core.sync.journal import RESULT_FILE, Journal, RoundReader, Segment, upload_file
from spes_core.sync.messages import Schema
from spes_core.sync.robust import UpdateLength, combine


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What one round's new weights are made of."""

    round: int
    partition: Partition
    tokens: Mapping[int, int]
    """Tokens of each node that takes part: its weight."""
    tensors: Mapping[int, Sequence[int]]
    """What each of them uploaded, in order."""
    scales: Mapping[int, float] | None
    """Under "clipped": by how much each node's update is shortened."""
    alpha: float
    """Weight of the merge; 0 for none."""


class ResultFile:
    """Takes the encoded changes of a round, one after another."""

    def __init__(self, journal: Journal, round: int) -> None:
        self._journal = journal
        try:
            journal.path(round).mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            self._file = os.open(journal.path(round) / RESULT_FILE, flags, 0o600)
        except OSError as error:
            raise journal.failed(error) from error
        self.size_bytes = 0

    def append(self, payload: memoryview) -> None:
        """Store the next bytes. Raises RoundFailed when the disk does not take them."""
        try:
            written = 0
            while written < len(payload):
                written += os.pwrite(self._file, payload[written:], self.size_bytes + written)
        except OSError as error:
            raise self._journal.failed(error) from error
        self.size_bytes += len(payload)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class _Blocks:
    """Reads blocks of what nodes sent, one buffer for each node that is looked at together with others."""

    def __init__(self, schema: Schema, state: GlobalState, codec: Codec, folder: Path) -> None:
        self._schema, self._state, self._codec = schema, state, codec
        self._reader = RoundReader(folder)
        self._payloads: list[memoryview] = []
        self._values: list[Values] = []

    def of_tensor(self, tensor: int) -> Iterator[slice]:
        """Positions in the flat buffer; every block but the last holds whole blocks of the codec."""
        end = self._state.starts[tensor + 1]
        for start in range(self._state.starts[tensor], end, BLOCK_ELEMENTS):
            yield slice(start, min(start + BLOCK_ELEMENTS, end))

    def offsets(self, tensors: Sequence[int]) -> dict[int, int]:
        """Where each tensor begins in an upload of ``tensors``."""
        sizes = [self._codec.format.encoded_bytes(self._schema[tensor].num_elements) for tensor in tensors]
        return dict(zip(tensors, accumulate(sizes, initial=0), strict=False))

    def read(self, node: int, offset: int, tensor: int, block: slice, place: int = 0) -> Values:
        """What a node sent for a block, as values; valid until the same ``place`` is asked for again.

        ``offset`` is where the tensor begins in its upload.
        """
        if place == len(self._payloads):
            self._payloads.append(memoryview(bytearray(4 * BLOCK_ELEMENTS)))
            self._values.append(make_scratch())
        wire, size = self._codec.format, block.stop - block.start
        payload = self._payloads[place][: wire.encoded_bytes(size)]
        self._reader.read_into(
            upload_file(node), offset + wire.encoded_bytes(block.start - self._state.starts[tensor]), payload
        )
        if not self._codec.is_delta:
            return self._codec.decode(payload)
        return decode_change(self._codec, payload, self._state.values[block], self._values[place][:size])

    def close(self) -> None:
        """Close the files."""
        self._reader.close()


class Aggregation:
    """One round; `form` is called for each group in order. Changes ``state`` in place. Used by one thread."""

    def __init__(
        self, config: RunConfig, schema: Schema, state: GlobalState, codec: Codec, journal: Journal, inputs: Inputs
    ) -> None:
        self._config, self._schema, self._state, self._codec, self._inputs = config, schema, state, codec, inputs
        self._sent = _Blocks(schema, state, codec, journal.path(inputs.round))
        self._result = ResultFile(journal, inputs.round)
        self._offsets = {node: self._sent.offsets(tensors) for node, tensors in inputs.tensors.items()}
        self._new, self._work = make_scratch(), make_scratch()
        self._encoded = memoryview(bytearray(4 * BLOCK_ELEMENTS))
        self._hasher = xxhash.xxh3_64()
        self.segments: list[Segment | None] = []
        """By tensor: where its encoded change lies; None where it has none."""
        self.merge_s = 0.0
        self.aggregate_s = 0.0

    def form(self, group: Group) -> None:
        """Form the new values of the next group."""
        began_s, merged_s = time.perf_counter(), self.merge_s
        is_merged = group.layer is not None and self._inputs.alpha > 0
        if is_merged:
            self._form_merged(group)
        else:
            for tensor in group.tensors:
                self._form_tensor(tensor)
        self._hasher.update(self._state.values[self._state.span(group)].data.cast("B"))
        self.aggregate_s += time.perf_counter() - began_s - (self.merge_s - merged_s)

    def digest(self) -> str:
        """XXH3-64 (hex) of all new values in canonical order, once every group is formed."""
        return self._hasher.hexdigest()

    def close(self) -> None:
        """Close the files."""
        self._sent.close()
        self._result.close()

    def _form_tensor(self, tensor: int) -> None:
        inputs, name = self._inputs, self._schema[tensor].name
        present = self._trainers(name)
        if not present:
            self.segments.append(None)
        elif inputs.partition.trainers(name) == tuple(present) and len(present) == 1 and not self._steps_outer:
            node = present[0]
            for block in self._sent.of_tensor(tensor):
                self._state.values[block] = self._sent.read(node, self._offsets[node][tensor], tensor, block)
            length = self._codec.format.encoded_bytes(self._schema[tensor].num_elements)
            self.segments.append(Segment(upload_file(node), self._offsets[node][tensor], length))
        else:
            start = self._result.size_bytes
            for block in self._sent.of_tensor(tensor):
                new = self._new[: block.stop - block.start]
                self._combine(tensor, present, block, new)
                self._publish(new, self._state.values[block], block)
            self.segments.append(Segment(RESULT_FILE, start, self._result.size_bytes - start))

    def _form_merged(self, group: Group) -> None:
        """All experts of a layer: first their new values in place, then the merge, then what changed."""
        span = self._state.span(group)
        old = self._state.values[span].copy() if self._codec.is_delta else None
        for tensor in group.tensors:
            if present := self._trainers(self._schema[tensor].name):
                for block in self._sent.of_tensor(tensor):
                    new = self._new[: block.stop - block.start]
                    self._combine(tensor, present, block, new)
                    self._state.values[block] = new
        began_s = time.perf_counter()
        assert group.layer is not None
        self._state.merge(group.layer, self._config.merge.num_neighbours, self._inputs.alpha)
        self.merge_s += time.perf_counter() - began_s
        for tensor in group.tensors:
            start = self._result.size_bytes
            for block in self._sent.of_tensor(tensor):
                values = self._state.values[block]
                base = values if old is None else old[block.start - span.start : block.stop - span.start]
                self._publish(values, base, block)
            self.segments.append(Segment(RESULT_FILE, start, self._result.size_bytes - start))

    @property
    def _steps_outer(self) -> bool:
        return self._config.outer.kind != "none"

    def _trainers(self, name: str) -> list[int]:
        """The nodes that take part and trained a tensor, ascending."""
        return [node for node in self._inputs.partition.trainers(name) if node in self._inputs.tokens]

    def _combine(self, tensor: int, present: Sequence[int], block: slice, new: Values) -> None:
        """What the rule and the outer optimizer make of what the nodes sent, into ``new``."""
        inputs, old, rule = self._inputs, self._state.values[block], self._config.aggregate
        if rule.rule == "mean":
            weight_before = 0
            for node in present:
                values = self._sent.read(node, self._offsets[node][tensor], tensor, block)
                add_to_mean(new, values, inputs.tokens[node], weight_before, self._work)
                weight_before += inputs.tokens[node]
        else:
            sent = [
                self._sent.read(node, self._offsets[node][tensor], tensor, block, place)
                for place, node in enumerate(present)
            ]
            weights = [inputs.tokens[node] for node in present]
            scales = None if inputs.scales is None else [inputs.scales[node] for node in present]
            combine(rule.rule, old, sent, weights, rule, scales, new, self._work)
        if self._steps_outer:
            momentum = None if self._state.momentum is None else self._state.momentum[block]
            moved = self._work[: new.size]
            moved[:] = old
            outer_step(moved, new, momentum, self._config.outer)
            new[:] = moved

    def _publish(self, new: Values, base: Values, block: slice) -> None:
        """Append the encoded change from ``base`` to ``new``, and adopt what it decodes to."""
        residual = None if self._state.residual is None else self._state.residual[block]
        payload = encode_change(self._codec, new, base, residual, self._encoded)
        self._result.append(payload)
        if self._codec.is_delta:
            decode_change(self._codec, payload, base, self._state.values[block])
        elif new is not base:
            self._state.values[block] = new


class Lengths(NamedTuple):
    """How far the updates of the nodes of a round reach, each by node."""

    shared: list[float]
    """Euclidean length of the update of all tensors that every one of them trains, so that it can be compared."""
    own: list[float]
    """Of the update of the others, experts that not everyone trains."""


def lengths(
    schema: Schema, state: GlobalState, codec: Codec, journal: Journal, round: int, tensors: Mapping[int, Sequence[int]]
) -> Lengths:
    """The lengths of what the nodes ``tensors`` (with what each uploaded, in order) sent in a round."""
    sent, found = _Blocks(schema, state, codec, journal.path(round)), Lengths([], [])
    common = set[int].intersection(*map(set, tensors.values()))
    try:
        for node, uploaded in tensors.items():
            shared, own = UpdateLength(), UpdateLength()
            for tensor, offset in sent.offsets(uploaded).items():
                length = shared if tensor in common else own
                for block in sent.of_tensor(tensor):
                    values = sent.read(node, offset, tensor, block)
                    length.add(state.values[block], values, block.start - state.starts[tensor])
            found.shared.append(shared.length)
            found.own.append(own.length)
    finally:
        sent.close()
    return found
