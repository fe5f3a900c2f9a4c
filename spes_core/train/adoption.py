"""Where a download goes: each change into the global copy as it comes, hashed on its way.

The digest of the new global weights is taken tensor by tensor in canonical order while they are still in the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import xxhash

from spes_core.errors import ProtocolError, Unreachable
from spes_core.sync.codec import Float32
from spes_core.sync.messages import DownloadManifest
from spes_core.train.global_copy import GlobalCopy


def digest_of(copy: GlobalCopy) -> str:
    """XXH3-64 (hex) of all global weights in canonical order, read one tensor at a time."""
    hasher = xxhash.xxh3_64()
    for index in range(len(copy.sizes)):
        hasher.update(copy.exact(index).data)
    return hasher.hexdigest()


class Gate:
    """Keeps a download that overtakes its upload from changing what is yet to be sent.

    A tensor may be adopted once the upload has asked for a later one, or has ended. The server sends no result before
    it has the upload up to there, so this waits only where it has that from an earlier life of the node.
    """

    def __init__(self, name_of: Callable[[int], str]) -> None:
        self._name_of = name_of
        self._condition = threading.Condition()
        self._encoding = -1
        self._adopted = -1
        self._is_open = self._is_closed = False

    def encoding(self, index: int) -> None:
        """The upload asks for a tensor. Raises ProtocolError when the download has already replaced it."""
        with self._condition:
            if index <= self._adopted:
                raise ProtocolError(
                    f"the server asks again for {self._name_of(index)}, whose result it has sent: it lost uploads that"
                    " it had stored; restart this node, which then goes on from its checkpoint"
                )
            self._encoding = index
            self._condition.notify_all()

    def wait_begun(self) -> None:
        """Wait until the upload asks for its first tensor, or is over: only then is there a result to ask for.

        Raises Unreachable when it has failed.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._is_open or self._is_closed or self._encoding >= 0)
            self._check_open()

    def open(self) -> None:
        """The upload is over: everything may be adopted."""
        with self._condition:
            self._is_open = True
            self._condition.notify_all()

    def close(self) -> None:
        """One of the two has failed: nothing more may be adopted."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def adopt(self, index: int) -> None:
        """Wait until a tensor may be changed. Raises Unreachable when the upload has failed."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_open or self._is_closed or index < self._encoding)
            self._check_open()
            self._adopted = index

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unreachable("the upload beside this download has failed")


class Adoption:
    """Takes the result of a round: changes of what the node lacks; of the rest it keeps what it sent itself."""

    def __init__(
        self,
        copy: GlobalCopy,
        gate: Gate,
        experts: tuple[int, ...],
        lacking: Callable[[tuple[int, ...], bool], tuple[set[int], set[int]]],
    ) -> None:
        """``lacking(experts, merged)`` tells which tensors must come, and which may."""
        self._copy, self._gate, self._experts, self._lacking = copy, gate, experts, lacking
        self._hasher = xxhash.xxh3_64()
        self._announced: frozenset[int] = frozenset()
        self._next = 0
        """Tensors below are adopted and hashed."""

    def begin(self, manifest: DownloadManifest) -> None:
        """Refuse a download of other tensors than the rule gives this node."""
        must, may = self._lacking(self._experts, manifest.merged)
        self._announced = frozenset(manifest.tensors)
        if not must <= self._announced <= may or manifest.experts != self._experts:
            raise ProtocolError("the server announced other tensors than this node lacks")

    def write(self, tensor: int, offset: int, payload: memoryview) -> None:
        """Adopt one chunk."""
        if offset == 0:
            self._pass_to(tensor)
            self._gate.adopt(tensor)
            self._next = tensor + 1
        self._hasher.update(self._copy.decode(tensor, offset, payload).data)

    def finish(self) -> str:
        """The digest of all global weights, once everything announced has come."""
        self._pass_to(len(self._copy.sizes))
        return self._hasher.hexdigest()

    def _pass_to(self, tensor: int) -> None:
        """Adopt what no change was announced for, up to ``tensor``: what the node sent, or the old value."""
        trained = set(self._copy.trained)
        for index in range(self._next, tensor):
            is_own = index in trained and index not in self._announced
            if is_own:
                self._gate.adopt(index)
            values = self._copy.keep(index) if is_own else self._copy.exact(index)
            self._hasher.update(values.data)
        self._next = tensor


class SnapshotAdoption:
    """Takes all global weights as exact float32."""

    def __init__(self, copy: GlobalCopy) -> None:
        self._copy, self._codec = copy, Float32()
        self._hasher = xxhash.xxh3_64()

    def begin(self, manifest: DownloadManifest) -> None:
        """Refuse anything but everything, exactly."""
        everything = tuple(range(len(self._copy.sizes)))
        if manifest.codec != self._codec.format.name or manifest.tensors != everything:
            raise ProtocolError("the server announced a snapshot that is not all of the weights in float32")

    def write(self, tensor: int, offset: int, payload: memoryview) -> None:
        """Adopt one chunk."""
        values = self._codec.decode(payload)
        self._copy.set(tensor, self._codec.format.elements(offset), values)
        self._hasher.update(values.data)

    def finish(self) -> str:
        """The digest of what came."""
        return self._hasher.hexdigest()
