"""A node that kills itself (SIGKILL), starts again and so on to its end: `python -m ... RUN.json NODE PHASE...`.

It dies in the first phase in round 1, in its next life in the second phase in round 2, …. Lives are forks of a process
that has everything imported. Only what stands around the rounds is replaced; all else is the real process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from spes_core import node as process
from spes_core.data.batches import TokenSource
from spes_core.protocol.connect import connect
from spes_core.sync.client import DownloadReport, PayloadOf, Sink, UploadReport
from spes_core.sync.messages import DownloadManifest
from spes_core.train import resume

PHASES = ("local steps", "encoding", "upload", "waiting", "download", "applying", "applied", "checkpoint")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class Killing:
    """A client that dies in one phase of one round; for everything else the real one."""

    def __init__(self, client: Any, phase: str, round: int) -> None:
        self._client, self._phase, self._round = client, phase, round

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def __enter__(self) -> Killing:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def upload(self, *, round: int, payload_of: PayloadOf, **others: Any) -> UploadReport:
        is_due, middle = round == self._round, others["tensors"][len(others["tensors"]) // 2]

        def payload(tensor: int) -> memoryview:
            if is_due and tensor == middle and self._phase == "upload":
                time.sleep(0.1)  # What was sent before arrives.
                die()
            encoded = payload_of(tensor)
            if is_due and tensor == middle and self._phase == "encoding":
                die()
            return encoded

        report: UploadReport = self._client.upload(round=round, payload_of=payload, **others)
        if is_due and self._phase == "waiting":
            die()
        return report

    def download(self, *, round: int, sink: Sink) -> DownloadReport:
        phase = self._phase if round == self._round else ""

        class Between:
            """Dies before or after the fifth tensor is written."""

            tensors: tuple[int, ...] = ()

            def begin(self, manifest: DownloadManifest) -> None:
                self.tensors = manifest.tensors
                sink.begin(manifest)

            def write(self, tensor: int, offset: int, payload: memoryview) -> None:
                is_due = tensor == self.tensors[4]
                if is_due and phase == "download":
                    die()
                sink.write(tensor, offset, payload)
                if is_due and phase == "applying":
                    die()

        report: DownloadReport = self._client.download(round=round, sink=Between())
        if phase == "applied":
            die()
        return report


def main() -> None:
    path, node, phases = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    for round, phase in enumerate(phases, start=1):
        if (life := os.fork()) == 0:
            live(path, node, phase, round)
        _, status = os.waitpid(life, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"error: this life did not end by a kill in phase {phase!r} of round {round}")
    sys.exit(process.main([str(path), "--node", str(node)]))


def live(path: Path, node: int, phase: str, round: int) -> None:
    """One life."""
    process.connect = lambda *arguments: [Killing(client, phase, round) for client in connect(*arguments)]  # type: ignore[assignment]

    class Source(TokenSource):
        def train_batch(self, step: int, part: int, parts: int) -> Any:
            if phase == "local steps" and step == 2 * round + 2:
                die()
            return super().train_batch(step, part, parts)

    process.TokenSource = Source  # type: ignore[misc]
    if phase == "checkpoint":
        write = resume.write_tensors

        def torn(file: Path, tensors: Any) -> str:
            written = write(file, tensors)
            if file.name.startswith(f"{2 * round}."):
                die()
            return written

        resume.write_tensors = torn
    sys.exit(process.main([str(path), "--node", str(node)]))


if __name__ == "__main__":
    main()
