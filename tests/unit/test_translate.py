"""Every record comes back from the wire as it was."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from spes_core.protocol import sync_pb2
from spes_core.protocol.translate import from_bytes, to_bytes
from spes_core.sync import messages
from tests.unit.test_transport import TOKEN, _manifest, hello

RECORDS = [
    hello(),
    replace(hello(), round=messages.ANY_ROUND, token=TOKEN),
    messages.Welcome(session=b"\0\xff", round=3, digest="d", experts=(1, 2)),
    replace(_manifest(None), session=b"s" * 16, tokens=2**53 - 1, safe_round=9),
    messages.UploadReady(offset_bytes=2**40, prefix_digest="00ff", is_complete=True),
    messages.Receipt(payload_bytes=2**35, store_s=0.25),
    messages.DownloadRequest(node=1, session=b"s", round=2, is_snapshot=True, offset_bytes=2**33),
    messages.DownloadManifest(round=1, step=2, codec="int4", tensors=(0, 5), merged=True, experts=(0,)),
    messages.RoundSummary(
        round=1, tokens=5, nodes=(0, 3), experts=(), aggregate_s=0.1, merge_s=0.2, wait_s=0.3, digest="x"
    ),
    messages.Heartbeat(node=1, session=b"s", step=4),
    messages.HeartbeatReply(round=8),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_survive_translation(record: Any) -> None:
    assert from_bytes(type(record), to_bytes(record)) == record


def test_the_generated_protobuf_file_describes_what_sync_proto_says(tmp_path: Path) -> None:
    # Descriptors, not text: another release of the generator writes other headers.
    root, made = Path(__file__).parents[2], tmp_path / "descriptors"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", f"--descriptor_set_out={made}"]
    subprocess.run([*command, "spes_core/protocol/sync.proto"], check=True, cwd=root)
    (described,) = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto()
    sync_pb2.DESCRIPTOR.CopyToProto(committed)
    for message in described.message_type:
        for field in message.field:
            field.ClearField("json_name")
    assert committed == described
