"""What a launcher and the agent on a host say to each other: a line of JSON, then as many raw bytes as it announces."""

from __future__ import annotations

import json
from typing import Any, BinaryIO, NamedTuple

MAX_LINE_BYTES = 4 << 20
"""Longest header; the largest one carries a whole run.json."""
MAX_BODY_BYTES = 8 << 20
CHUNK_BYTES = 1 << 20
"""Bytes of a file in one message."""
GREETING = b"spes-agent\n"
"""What an agent says first: a login shell may have printed something before it."""
_MAX_NOISE_BYTES = 64 << 10


class WireError(Exception):
    """What came is not a message."""


class Message(NamedTuple):
    """One message."""

    header: dict[str, Any]
    body: bytes


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """The bytes of one message."""
    whole = {**header, "bytes": len(body)} if body else header
    return json.dumps(whole).encode() + b"\n" + body


def skip_noise(stream: BinaryIO) -> bytes:
    """Read until an agent has greeted, or to the end of the stream; what came before that.

    Raises WireError when so much comes that no agent can be expected.
    """
    noise = b""
    while len(noise) <= _MAX_NOISE_BYTES:
        line = stream.readline(_MAX_NOISE_BYTES)
        if not line or line.endswith(GREETING):
            return noise
        noise += line
    raise WireError(f"{len(noise)} bytes came before its first word: {noise[:200]!r}")


def read(stream: BinaryIO) -> Message | None:
    """The next message; None at the end of the stream. Raises WireError for anything else."""
    line = stream.readline(MAX_LINE_BYTES)
    if not line:
        return None
    try:
        header = json.loads(line)
    except ValueError as error:
        raise WireError(f"a line that is no message: {line[:200]!r}") from error
    size = header.get("bytes", 0) if isinstance(header, dict) else -1
    if not isinstance(size, int) or not 0 <= size <= MAX_BODY_BYTES:
        raise WireError(f"a header that announces no possible number of bytes: {line[:200]!r}")
    body = stream.read(size) if size else b""
    if len(body) < size:
        raise WireError(f"the stream ended {size - len(body)} bytes before the end of a message")
    return Message(header, body)
