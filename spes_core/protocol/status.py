"""`python -m spes_core.server status ADDR`: what a running server says about its run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from spes_core.address import is_host_and_port
from spes_core.errors import ConfigError, Problem, SpesError
from spes_core.protocol.channel import Line, is_loopback
from spes_core.protocol.credentials import OPEN, load
from spes_core.protocol.retrying import translated

_TIMEOUT_S = 10.0


def main(arguments: Sequence[str]) -> int:
    """`python -m spes_core.server status`: its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m spes_core.server status",
        description="Ask a running server: its round, who is present, who is late, bytes, the last refusal.",
    )
    parser.add_argument("address", metavar="ADDR", help="host:port, as in server.address beside run.json")
    parser.add_argument("--credentials", type=Path, metavar="DIR", help="folder with a certificate of the run")
    parser.add_argument("--allow-plaintext", action="store_true", help="ask beyond this machine unencrypted")
    parser.add_argument("--json", action="store_true", help="print the answer as one JSON document")
    options = parser.parse_args(arguments)
    try:
        answer = ask(options.address, options.credentials, options.allow_plaintext)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SpesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer, indent=1) if options.json else "\n".join(lines(answer)))
    return 0


def ask(address: str, folder: Path | None = None, allow_plaintext: bool = False) -> dict[str, Any]:
    """The status of the server at ``address``. Raises ConfigError, Unreachable or ProtocolError."""
    if not is_host_and_port(address):
        raise ConfigError([Problem("ADDR", f'("{address}") must be host:port, as in server.address beside run.json')])
    if folder is None and not (allow_plaintext or is_loopback(address.rpartition(":")[0])):
        message = "is another machine's: name the run's --credentials DIR; a participant has them in its own folder"
        raise ConfigError([Problem("ADDR", f'("{address}") {message}')])
    line = Line(address, OPEN if folder is None else load(folder, None), allow_plaintext)
    try:
        reply: bytes = line.connected().status(b"", timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        raise translated(error, address) from error
    finally:
        line.close()
    answer: dict[str, Any] = json.loads(reply)
    return answer


def lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """The answer for a reader: single values one a line, and a table for everything that has rows."""
    plain = {key: value for key, value in answer.items() if not _rows(value)}
    width = max(map(len, plain), default=0)
    for key, value in plain.items():
        yield f"{key:<{width}}  {_text(value)}"
    for value in answer.values():
        if rows := _rows(value):
            yield ""
            yield from _table(rows)


def _rows(value: Any) -> list[dict[str, Any]]:
    """``value`` where it is a list of mappings; else nothing."""
    is_table = isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    return value if is_table else []


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([_text(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(columns))]
    for row in cells:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return "  ".join(f"{key}: {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "–"
    return str(value)
