"""One node's upload while it comes in: checked chunk by chunk and taken into the mean at once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import xxhash

from spes_core.errors import ProtocolError, RoundFailed
from spes_core.sync.aggregate import LARGEST, add_to_mean, are_usable, make_scratch
from spes_core.sync.codec import Values
from spes_core.sync.messages import Receipt, UploadManifest
from spes_core.sync.round import Round

if TYPE_CHECKING:
    from spes_core.sync.parameter_server import ParameterServer


class Upload:
    """Used by the one thread that receives the upload, apart from `cancel`.

    An upload that broke off may be sent again from its start: what the first attempt put into the mean is then
    skipped, once its checksum has shown that it is the same.
    """

    def __init__(self, server: ParameterServer, now: Round, manifest: UploadManifest, attempt: int) -> None:
        self._server, self.round, self.node = server, now, manifest.node
        self.contribution = now.contributions[manifest.node]
        self.attempt = attempt
        self._transfer = server.transfer(manifest.tensors)
        self._scratch = make_scratch()
        self._repeated = xxhash.xxh3_64()
        self._blocked_s = 0.0
        self._is_cancelled = False

    def add(self, tensor: int, offset: int, payload: memoryview) -> None:
        """Take the next chunk: ``payload`` lies ``offset`` bytes into the encoded ``tensor``.

        Blocks until the lower-numbered trainers of the tensor have come as far. Raises Refused for anything but the
        chunk that is due and for unusable values, RoundFailed when the round fails meanwhile.
        """
        try:
            self._transfer.accept(tensor, offset, len(payload))
        except ProtocolError as error:
            raise self._server.refuse(self.node, str(error)) from error
        values = self._server.codec.decode(payload)
        name = self._server.schema[tensor].name
        if not are_usable(values, self._scratch):
            raise self._server.refuse(self.node, f"tensor {name} has NaN or infinite values, or some above {LARGEST:g}")
        start = self._server.state.starts[tensor] + self._server.codec.format.elements(offset)
        trainers = self._server.partition.trainers(name)
        self.contribution.payload_bytes += len(payload)
        self._take_in(values, payload, start, trainers[: trainers.index(self.node)])

    def finish(self, framing_bytes: int = 0) -> Receipt:
        """The node says that everything has been sent."""
        try:
            self._transfer.finish()
        except ProtocolError as error:
            raise self._server.refuse(self.node, str(error)) from error
        close_s = self._server.complete_upload(self, framing_bytes)
        return Receipt(
            payload_bytes=self.contribution.payload_bytes,
            blocked_s=self._blocked_s,
            aggregate_s=self.contribution.aggregate_s,
            close_s=close_s,
        )

    def cancel(self) -> None:
        """The node went away: release the thread that waits in `add`. May be called by another thread."""
        self._is_cancelled = True
        self._server.wake()

    def is_cancelled(self) -> bool:
        """Whether the node went away."""
        return self._is_cancelled

    def _take_in(self, values: Values, payload: memoryview, start: int, before: tuple[int, ...]) -> None:
        """Add ``values``, which belong at ``start`` of the flat buffer, after the nodes ``before`` have."""
        part, end = self.contribution, start + values.size
        self._blocked_s += self._server.take_turn(self, before[-1:], end)
        position = part.position
        try:
            began_s = time.monotonic()
            known = min(max(position - start, 0), values.size)
            known_bytes = self._server.codec.format.encoded_bytes(known)
            if known:
                self._check_repeated(payload[:known_bytes], start + known)
            if known < values.size:
                part.hasher.update(payload[known_bytes:])
                mean = self._server.state.mean[start + known : end]
                weight_before = self.round.weight_of(before)
                add_to_mean(mean, values[known:], part.tokens, weight_before, self._scratch)
                position = end
            part.aggregate_s += time.monotonic() - began_s
        finally:
            self._server.pass_turn(self, position)

    def _check_repeated(self, payload: memoryview, end: int) -> None:
        """A second attempt must begin with the very bytes that are already in the mean."""
        self._repeated.update(payload)
        if end == self.contribution.position and self._repeated.digest() != self.contribution.hasher.digest():
            reason = (
                f"node {self.node} repeated a broken upload of round {self.round.index} with other values, after the"
                " first ones had entered the mean"
            )
            self._server.fail(reason)
            raise RoundFailed(reason)
