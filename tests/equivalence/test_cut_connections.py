"""Connections cut anywhere in a round change no bit, also where results are adopted while uploads still run."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from spes_core.protocol.client import SyncClient
from spes_core.sync.client import DownloadReport, Sink, UploadReport
from tests.cut_proxy import CutProxy, cut_proxy
from tests.small_rounds import make_server, run_rounds, running, served, small_config, small_schema


@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("cuts", [(6_000, 9_000, 3_000), (2_000, 2_000, 2_000, 20_000)])
def test_cut_connections_change_no_bit(codec: Any, cuts: tuple[int, ...]) -> None:
    base = small_config()
    config = small_config(wire=type(base.wire)(dtype=codec, chunk_bytes=1024))
    whole = make_server(config)
    with running(whole), served(whole, config) as address:
        run_rounds(config, lambda node: SyncClient(address, config, node))
    server = make_server(config)
    with running(server), served(server, config) as address, cut_proxy(address) as proxy:
        proxy.cut_after("up", *cuts)
        proxy.cut_after("down", *cuts)
        decoders, _ = run_rounds(config, lambda node: SyncClient(proxy.address, config, node))
        assert proxy.cuts >= len(cuts)
    assert server.state.values.tobytes() == whole.state.values.tobytes()
    for decoder in decoders:
        flat = torch.cat([decoder.weights[spec.name].flatten() for spec in small_schema(config)]).numpy()
        assert flat.tobytes() == whole.state.values.tobytes()


class Cutting(SyncClient):
    """Loses all connections once a part of each round's result was adopted and the upload is still under way."""

    proxy: CutProxy

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._adopted = threading.Event()

    def download(self, *, round: int, sink: Sink) -> DownloadReport:
        adopted = self._adopted

        class Between:
            begin = sink.begin

            def write(self, tensor: int, offset: int, payload: memoryview) -> None:
                sink.write(tensor, offset, payload)
                adopted.set()

        return super().download(round=round, sink=Between())

    def upload(self, *, payload_of: Any, tensors: tuple[int, ...], **others: Any) -> UploadReport:
        asked: list[int] = []
        self._adopted.clear()

        def payload(tensor: int) -> memoryview:
            asked.append(tensor)
            if len(asked) == len(tensors) - 2:
                assert self._adopted.wait(30)
                self.proxy.cut()
            return payload_of(tensor)

        report = super().upload(payload_of=payload, tensors=tensors, **others)
        assert len(asked) > len(tensors) and asked.count(tensors[0]) == 1, "some are asked for again, none replaced"
        return report


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_a_connection_lost_beside_a_download_asks_for_no_tensor_that_was_replaced(codec: Any) -> None:
    base = small_config()
    config = small_config(wire=type(base.wire)(dtype=codec, chunk_bytes=1024))
    server = make_server(config)
    with running(server), served(server, config) as address, cut_proxy(address) as proxy:
        Cutting.proxy = proxy
        decoders, _ = run_rounds(config, lambda node: Cutting(proxy.address, config, node))
    for decoder in decoders:
        flat = torch.cat([decoder.weights[spec.name].flatten() for spec in small_schema(config)]).numpy()
        assert flat.tobytes() == server.state.values.tobytes()
