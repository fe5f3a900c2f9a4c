"""A round over a real connection on an emulated link takes as long as its bytes need, and gives the same weights."""

from __future__ import annotations

import time
from dataclasses import replace

from spes_core.config import LinkConfig
from spes_core.link import round_s, transfer_s
from spes_core.model.counting import round_bytes
from spes_core.protocol.client import SyncClient
from tests.small_rounds import make_server, run_rounds, running, served, small_config


def test_a_round_on_an_emulated_link_takes_between_its_larger_direction_and_both() -> None:
    plain = small_config()
    size = round_bytes(plain, 0, merged=True)
    link = LinkConfig(
        uplink_mbps=size.uplink_payload_bytes * 8 / 0.4e6,  # 0.4 s up
        downlink_mbps=size.downlink_payload_bytes * 8 / 0.8e6,  # 0.8 s down
        rtt_ms=20,
        emulate=True,
    )
    config = replace(plain, link=link)
    up, down = size.uplink_payload_bytes, size.downlink_payload_bytes
    with running(core := make_server(config)), served(core, config) as address:
        clients = [SyncClient(address, config, node) for node in range(config.nodes)]
        began_s = time.perf_counter()
        decoders, reports = run_rounds(config, clients.__getitem__, num_rounds=1)
        elapsed_s = time.perf_counter() - began_s
        for client in clients:
            client.close()
    assert elapsed_s >= round_s(link, up, down)
    assert elapsed_s <= transfer_s(link, up, "up") + transfer_s(link, down, "down") + 0.5
    assert reports[0][0].transfer_s > 0.7 and reports[0][0].serialise_s < 0.3
    assert decoders[0].weights.keys() == decoders[1].weights.keys()
    for name, tensor in decoders[0].weights.items():
        assert tensor.equal(decoders[1].weights[name])


def test_a_link_that_is_only_stated_slows_nothing() -> None:
    link = LinkConfig(uplink_mbps=0.001, downlink_mbps=0.001, rtt_ms=10_000, emulate=False)
    config = replace(small_config(), link=link)
    with running(core := make_server(config)), served(core, config) as address:
        began_s = time.perf_counter()
        run_rounds(config, lambda node: SyncClient(address, config, node), num_rounds=1)
        assert time.perf_counter() - began_s < 8
