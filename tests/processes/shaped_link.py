"""Times transfers over gRPC that the kernel shapes (tbf between two network namespaces), and ones that are paced.

Run as root in a network namespace of its own: `unshare --net python -m tests.processes.shaped_link`. Writes a JSON list
of rows; all that it makes is gone when the two processes end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from spes_core.config import LinkConfig
from spes_core.processlife import die_with_parent
from spes_core.protocol import channel
from spes_core.protocol.link import Pace

HERE, THERE = "10.77.0.1", "10.77.0.2"
CHUNK_BYTES = 1 << 18
CASES = ((100, 6_000_000, 0.0), (100, 6_000_000, 0.01), (50, 1_500_000, 0.0), (10, 1_000_000, 0.0), (10, 300_000, 0.0))
"""Bandwidth in Mbit/s, bytes, and seconds that the node is busy with each chunk."""


class Handler(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Swallows what comes, or sends as many bytes as it is asked for."""

    def service(self, details: Any) -> Any:
        if details.method == "/test/Up":
            return grpc.stream_unary_rpc_method_handler(lambda requests, _: b"%d" % sum(map(len, requests)))
        return grpc.unary_stream_rpc_method_handler(lambda request, _: chunks(int(request)))


def chunks(num_bytes: int) -> Iterator[bytes]:
    for begin in range(0, num_bytes, CHUNK_BYTES):
        yield bytes(min(CHUNK_BYTES, num_bytes - begin))


TRIES = 3
"""A busy machine only adds time: where the two differ, each is measured again and the shortest counts."""


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def serve() -> None:
    die_with_parent()
    for _ in range(200):
        if subprocess.run(["ip", "link", "show", "there"], capture_output=True, check=False).returncode == 0:
            break
        time.sleep(0.02)
    run(f"ip addr add {THERE}/24 dev there")
    run("ip link set there up")
    server = grpc.server(ThreadPoolExecutor(4), options=channel.OPTIONS)
    server.add_generic_rpc_handlers((Handler(),))
    server.add_insecure_port(f"{THERE}:7700")
    server.start()
    server.wait_for_termination()


def shape(server: int, mbps: int | None) -> None:
    """Limit both ends to ``mbps``; None: not at all."""
    for prefix, device in (("", "here"), (f"nsenter -t {server} -n ", "there")):
        subprocess.run(f"{prefix}tc qdisc del dev {device} root".split(), capture_output=True, check=False)
        if mbps is not None:
            run(f"{prefix}tc qdisc add dev {device} root tbf rate {mbps}mbit burst 16kb latency 100ms")


def slowly(messages: Iterator[bytes], busy_s: float) -> Iterator[bytes]:
    for message in messages:
        time.sleep(busy_s)
        yield message


def up_s(connection: grpc.Channel, pace: Pace, num_bytes: int, busy_s: float) -> float:
    began_s = time.perf_counter()
    pace.turn()
    reply = connection.stream_unary("/test/Up", None, None)(pace.outgoing(slowly(chunks(num_bytes), busy_s)))
    assert int(reply) == num_bytes
    return time.perf_counter() - began_s


def down_s(connection: grpc.Channel, pace: Pace, num_bytes: int, busy_s: float) -> float:
    began_s = time.perf_counter()
    pace.turn()
    call = connection.unary_stream("/test/Down", None, None)(b"%d" % num_bytes)
    assert sum(map(len, slowly(pace.incoming(call), busy_s))) == num_bytes
    return time.perf_counter() - began_s


def main() -> None:
    run("ip link add here type veth peer name there")
    command = ["unshare", "--net", sys.executable, "-m", "tests.processes.shaped_link", "serve"]
    with subprocess.Popen(command) as server:
        while Path(f"/proc/{server.pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
            time.sleep(0.01)
        run(f"ip link set there netns {server.pid}")
        run(f"ip addr add {HERE}/24 dev here")
        run("ip link set here up")
        rows = []
        with grpc.insecure_channel(f"{THERE}:7700", options=channel.OPTIONS) as connection:
            grpc.channel_ready_future(connection).result(20)
            for transfer in (up_s, down_s):
                transfer(connection, Pace(LinkConfig()), CHUNK_BYTES, 0.0)
            for mbps, num_bytes, busy_s in CASES:
                link = LinkConfig(uplink_mbps=mbps, downlink_mbps=mbps, emulate=True)
                for name, transfer in (("up", up_s), ("down", down_s)):
                    kernel_s = paced_s = float("inf")
                    for _ in range(TRIES):
                        shape(server.pid, mbps)
                        kernel_s = min(kernel_s, transfer(connection, Pace(LinkConfig()), num_bytes, busy_s))
                        shape(server.pid, None)
                        paced_s = min(paced_s, transfer(connection, Pace(link), num_bytes, busy_s))
                        if abs(paced_s / kernel_s - 1) < 0.08:
                            break
                    label = f"{name} {num_bytes} bytes at {mbps} Mbit/s, {1e3 * busy_s:g} ms busy with each chunk"
                    rows.append({"label": label, "kernel_s": kernel_s, "paced_s": paced_s})
        server.kill()
    print(json.dumps(rows))


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
