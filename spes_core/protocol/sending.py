"""One upload as a node sends it: the frames of an attempt, made one at a time, going on where the server says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import xxhash

from spes_core.protocol import frames
from spes_core.protocol.frames import Kind
from spes_core.sync.client import PayloadOf
from spes_core.sync.messages import UploadReady
from spes_core.sync.transfer import WireFormat


class Sending:
    """The encoded tensors of one upload, and what sending them has cost over all attempts."""

    def __init__(self, tensors: Sequence[int], payload_of: PayloadOf, wire: WireFormat, chunk_bytes: int) -> None:
        self.tensors, self.payload_of = tensors, payload_of
        self.wire, self.chunk_bytes = wire, chunk_bytes
        self.stored_bytes = -1
        """The farthest that the server has said to be."""
        self.prefixes: list[tuple[int, Any]] = []
        """For each tensor encoded so far, in order: the bytes up to its end, and their running digest."""
        self.payload_bytes = 0
        self.earlier_bytes = 0
        self.framing_bytes = 0
        self.serialise_s = 0.0
        self.error: Exception | None = None
        """What went wrong while encoding: gRPC itself would only say that the call was cancelled."""

    def count_as_sent(self, stored_bytes: int) -> None:
        """Count what the server has of this upload beyond all that this process has sent."""
        self.earlier_bytes = max(self.earlier_bytes, stored_bytes - self.payload_bytes)


class Attempt:
    """The messages of one attempt, taken by gRPC in a thread of its own while the caller reads the server's answers."""

    def __init__(self, sending: Sending, manifest: bytes) -> None:
        self._sending, self._manifest = sending, manifest
        self._ready: UploadReady | None = None
        self._is_decided = threading.Event()
        self._is_ended = False
        self._encoding = threading.Lock()

    def go_on(self, ready: UploadReady) -> None:
        """The server has said where."""
        self._ready = ready
        self._is_decided.set()

    def end(self) -> None:
        """Make no more messages; once this returns no tensor is being encoded."""
        self._is_ended = True
        self._is_decided.set()
        with self._encoding:
            pass

    def __iter__(self) -> Iterator[bytes]:
        yield self._pack(Kind.MANIFEST, self._manifest)
        self._is_decided.wait()
        if self._ready is None or self._is_ended:
            return
        try:
            yield from self._after_ready(self._ready)
        except _EndedError:
            return
        except Exception as error:
            self._sending.error = error
            raise

    def _after_ready(self, ready: UploadReady) -> Iterator[bytes]:
        tensors, first, at = self._sending.tensors, 0, 0
        payload: memoryview | None = None
        if ready.offset_bytes or ready.is_complete:
            first, payload, at, is_same = self._compare(ready)
            if is_same:
                self._sending.count_as_sent(ready.offset_bytes)
            else:
                yield self._pack(Kind.RESTART)
                first, payload, at = 0, None, 0
        for index in range(first, len(tensors)):
            if payload is None:
                payload = self._encoded(index)
            for offset, length in self._sending.wire.chunks(len(payload), self._sending.chunk_bytes, at):
                yield self._pack(Kind.CHUNK, payload[offset : offset + length], tensors[index], offset)
            payload, at = None, 0
        yield self._pack(Kind.END)

    def _compare(self, ready: UploadReady) -> tuple[int, memoryview | None, int, bool]:
        """Whether the bytes that the server has are ours, and where they end: tensor, its payload, bytes into it.

        Of tensors that were encoded before, the digest is remembered: they are not asked for again, since their results
        may have replaced them meanwhile.
        """
        tensors, left_bytes, hasher = self._sending.tensors, ready.offset_bytes, xxhash.xxh3_64()
        known_prefixes = [prefix for prefix in self._sending.prefixes if prefix[0] <= ready.offset_bytes]
        if known_prefixes:
            left_bytes, hasher = ready.offset_bytes - known_prefixes[-1][0], known_prefixes[-1][1].copy()
        for index in range(len(known_prefixes), len(tensors)):
            payload = self._encoded(index)
            began_s = time.perf_counter()
            known = min(left_bytes, len(payload))
            hasher.update(payload[:known])
            self._sending.serialise_s += time.perf_counter() - began_s
            left_bytes -= known
            if known < len(payload):
                return index, payload, known, left_bytes == 0 and hasher.hexdigest() == ready.prefix_digest
        return len(tensors), None, 0, left_bytes == 0 and hasher.hexdigest() == ready.prefix_digest

    def _encoded(self, index: int) -> memoryview:
        """The payload of one of the tensors."""
        prefixes = self._sending.prefixes
        with self._encoding:
            if self._is_ended:
                raise _EndedError
            began_s = time.perf_counter()
            payload = self._sending.payload_of(self._sending.tensors[index])
            if index == len(prefixes):
                size, hasher = (prefixes[-1][0], prefixes[-1][1].copy()) if prefixes else (0, xxhash.xxh3_64())
                hasher.update(payload)
                prefixes.append((size + len(payload), hasher))
            self._sending.serialise_s += time.perf_counter() - began_s
            return payload

    def _pack(self, kind: Kind, payload: bytes | memoryview = b"", tensor: int = 0, offset: int = 0) -> bytes:
        began_s = time.perf_counter()
        message = frames.pack(kind, payload, tensor=tensor, offset=offset)
        if kind == Kind.CHUNK:
            self._sending.payload_bytes += len(payload)
        self._sending.framing_bytes += len(message) - (len(payload) if kind == Kind.CHUNK else 0)
        self._sending.serialise_s += time.perf_counter() - began_s
        return message


class _EndedError(Exception):
    """The attempt was given up while its messages were being made."""
