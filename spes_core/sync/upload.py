"""One node's upload while it comes in: checked chunk by chunk, and stored at once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from spes_core.errors import ProtocolError, Refused
from spes_core.sync.codec import USABLE
from spes_core.sync.journal import UploadFile, UploadRecord
from spes_core.sync.messages import Receipt, UploadManifest, UploadReady
from spes_core.sync.round import Round

if TYPE_CHECKING:
    from spes_core.sync.parameter_server import ParameterServer


class Upload:
    """Used by the one thread that receives the upload.

    Goes on where an earlier attempt of the same node stopped, at a chunk's border; ``ready`` says where.
    """

    def __init__(
        self, server: ParameterServer, now: Round, manifest: UploadManifest, attempt: int, file: UploadFile | None
    ) -> None:
        """``file`` is None when the upload has been finished before."""
        self._server, self.round, self.node, self._manifest = server, now, manifest.node, manifest
        self.contribution, self.attempt = now.contributions[manifest.node], attempt
        self._file = file
        self._transfer = server.transfer(manifest.tensors)
        if file is None:
            part = self.contribution
            self.ready = UploadReady(offset_bytes=part.payload_bytes, prefix_digest=part.digest, is_complete=True)
        else:
            whole = self._transfer.skip(file.size_bytes)
            if whole != file.size_bytes:
                file.cut(whole)
            self.contribution.next_tensor = self._transfer.next_tensor
            self.ready = UploadReady(offset_bytes=whole, prefix_digest=file.digest, is_complete=False)

    def restart(self) -> None:
        """The node's bytes are not those that an earlier attempt stored: begin again.

        Raises Refused when they have already entered the new weights.
        """
        self._server.begin_restart(self)
        assert self._file is not None
        try:
            with self._server.storing():
                self._file.cut(0)
            self._transfer = self._server.transfer(self._manifest.tensors)
        finally:
            self._server.end_chunk(self, 0)

    def add(self, tensor: int, offset: int, payload: memoryview) -> None:
        """Take the next chunk: ``payload`` lies ``offset`` bytes into the encoded ``tensor``.

        Raises Refused for anything but the chunk that is due and for unusable values, StaleRound when the round has
        closed meanwhile, RoundFailed when it failed or the disk does not take the chunk.
        """
        began_s = time.perf_counter()
        try:
            self._transfer.accept(tensor, offset, len(payload))
        except ProtocolError as error:
            raise self._server.refuse(self.node, str(error)) from error
        self._check_values(tensor, payload)
        part, next_tensor = self.contribution, self.contribution.next_tensor
        assert self._file is not None
        self._server.begin_chunk(self)
        try:
            with self._server.storing():
                self._file.append(payload)
            next_tensor = self._transfer.next_tensor
        finally:
            part.store_s += time.perf_counter() - began_s
            self._server.end_chunk(self, next_tensor)

    def finish(self, framing_bytes: int = 0) -> Receipt:
        """The node says that everything has been sent."""
        part = self.contribution
        if self._file is not None:
            try:
                self._transfer.finish()
            except ProtocolError as error:
                raise self._server.refuse(self.node, str(error)) from error
            record = UploadRecord(
                tokens=part.tokens,
                tensors=self._manifest.tensors,
                payload_bytes=self._file.size_bytes,
                framing_bytes=framing_bytes,
                digest=self._file.digest,
            )
            self._server.complete_upload(self, record)
            self._file.close()
        return Receipt(payload_bytes=part.payload_bytes, store_s=part.store_s)

    def close(self) -> None:
        """Let go of the file; what is stored stays."""
        if self._file is not None:
            self._file.close()

    def _check_values(self, tensor: int, payload: memoryview) -> None:
        if not self._server.codec.is_usable(payload):
            name = self._server.schema[tensor].name
            raise self._refused(f"tensor {name} has NaN or infinite values, or some above {USABLE:g}")

    def _refused(self, reason: str) -> Refused:
        return self._server.refuse(self.node, reason)
