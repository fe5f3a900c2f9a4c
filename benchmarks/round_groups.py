"""The processes of a round benchmark: one server and N nodes, taken through rounds one at a time and measured.

Nodes train nothing: before a round each scales what it trains by a factor of its own. All clocks are the machine's
monotonic one, so a round's wall time is from the moment that all nodes begin to the moment that the last one is done.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.naive_round import NaiveExchange
from spes_core.address import address_file
from spes_core.config import RunConfig
from spes_core.initial import initial_weights
from spes_core.model.counting import tensor_shapes
from spes_core.processlife import die_with_parent
from spes_core.protocol import credentials
from spes_core.protocol.client import SyncClient
from spes_core.runfile import RunFile
from spes_core.train.exchange import Exchange
from spes_core.train.weights import LocalWeights

Protocol = Literal["naive", "ours"]
_SERVERS = {"naive": ("benchmarks.naive_round",), "ours": ("spes_core.server", "--die-with-parent")}
_TICKS = os.sysconf("SC_CLK_TCK")
_PATIENCE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class NodeRound:
    """One node's part in one round."""

    ended_s: float
    cpu_s: float
    base_bytes: int
    """Resident memory of the process with its model and before it joined."""
    idle_bytes: int
    """Resident memory before the round."""
    peak_bytes: int
    report: dict[str, Any]
    """The fields of the round event."""


@dataclass(frozen=True, kw_only=True)
class GroupRound:
    """One round of all processes."""

    wall_s: float
    server_cpu_s: float
    server_peak_bytes: int
    nodes: tuple[NodeRound, ...]

    @property
    def moved_bytes(self) -> int:
        """Payload of all nodes in both directions."""
        return sum(node.report[f"{way}link_payload_bytes"] for node in self.nodes for way in ("up", "down"))

    @property
    def outside_share(self) -> float:
        """Share of the round that a node, on average, does not spend moving bytes."""
        return 1 - sum(node.report["transfer_s"] for node in self.nodes) / len(self.nodes) / self.wall_s


class Group:
    """The processes of one run, until `close`."""

    def __init__(self, protocol: Protocol, config: RunConfig) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="spes-round-"))
        self._children: list[Any] = []
        self._pipes: list[Connection] = []
        try:
            self._start(protocol, config)
        except BaseException:
            self.close()
            raise

    def _start(self, protocol: Protocol, config: RunConfig) -> None:
        run, output = self._folder / "run.json", self._folder / "server.log"
        RunFile(trial=f"benchmark of {protocol}", config=config, data_dir="none", device="cpu").save(run)
        with output.open("w") as log:
            command = [sys.executable, "-m", *_SERVERS[protocol], str(run)]
            self.server = subprocess.Popen(command, stdout=log, stderr=log)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.round_groups"])
        for node in range(config.nodes):
            here, there = context.Pipe()
            process = context.Process(target=node_main, args=(there, protocol, config, node, self._folder), daemon=True)
            process.start()
            self._children.append(process)
            self._pipes.append(here)
        address = self._address(output)
        for pipe in self._pipes:
            pipe.send(address)
        for pipe in self._pipes:
            self._answer(pipe)

    def run_round(self, round: int) -> GroupRound:
        """Take all nodes through one round."""
        idle = self._ask(("prepare", round))
        reset_peak(self.server.pid)
        cpu_s, began_s = cpu_seconds(self.server.pid), time.monotonic() + 0.02
        nodes = tuple(
            NodeRound(idle_bytes=bytes_, **answer)
            for bytes_, answer in zip(idle, self._ask(("go", began_s)), strict=True)
        )
        return GroupRound(
            wall_s=max(node.ended_s for node in nodes) - began_s,
            server_cpu_s=cpu_seconds(self.server.pid) - cpu_s,
            server_peak_bytes=memory_bytes(self.server.pid, "VmHWM"),
            nodes=nodes,
        )

    def close(self) -> None:
        """End all processes and remove what they wrote."""
        for child in self._children:
            child.kill()
            child.join()
        if hasattr(self, "server"):
            self.server.kill()
            self.server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, command: tuple[str, Any]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(command)
        return [self._answer(pipe) for pipe in self._pipes]

    def _answer(self, pipe: Connection) -> Any:
        if not pipe.poll(_PATIENCE_S):
            raise TimeoutError(f"a node did not answer within {_PATIENCE_S:g} s")
        try:
            return pipe.recv()
        except EOFError:
            log = (self._folder / "server.log").read_text(encoding="utf-8")
            raise RuntimeError(f"a node ended; the server said: {log.strip() or 'nothing'}") from None

    def _address(self, output: Path) -> str:
        path, until_s = self._folder / address_file(), time.monotonic() + _PATIENCE_S
        while not path.exists():
            if self.server.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"the server does not listen: {output.read_text(encoding='utf-8').strip()}")
            time.sleep(0.02)
        return path.read_text(encoding="utf-8").split()[0]


def node_main(pipe: Connection, protocol: Protocol, config: RunConfig, node: int, folder: Path) -> None:
    """A node's process: makes its model, joins, then does as it is told."""
    die_with_parent()
    torch.set_num_threads(1)
    address, initial = pipe.recv(), initial_weights(config)
    state = {name: initial(name).contiguous() for name in tensor_shapes(config.model)}
    trained = [tensor for name, tensor in state.items() if config.make_partition().trains(node, name)]
    base_bytes = memory_bytes("self", "VmRSS")
    run_round = _EXCHANGES[protocol](address, config, node, state, folder)
    pipe.send(None)
    round = 0
    while True:
        command, argument = pipe.recv()
        if command == "prepare":
            round = argument
            for tensor in trained:
                tensor.mul_(1 + 1e-3 * (node + 1))
            reset_peak("self")
            pipe.send(memory_bytes("self", "VmRSS"))
            continue
        time.sleep(max(0.0, argument - time.monotonic()))
        cpu_s = time.process_time()
        report = run_round(round)
        pipe.send(
            {
                "ended_s": time.monotonic(),
                "cpu_s": time.process_time() - cpu_s,
                "base_bytes": base_bytes,
                "peak_bytes": memory_bytes("self", "VmHWM"),
                "report": report,
            }
        )


def _join_naive(
    address: str, config: RunConfig, node: int, state: dict[str, Tensor], _: Path
) -> Callable[[int], dict[str, Any]]:
    exchange = NaiveExchange(address, config, node, state)
    return lambda round: asdict(exchange.run_round(round))


def _join_ours(
    address: str, config: RunConfig, node: int, state: dict[str, Tensor], folder: Path
) -> Callable[[int], dict[str, Any]]:
    client = SyncClient(address, config, node, credentials.of_node(None, folder, node))
    exchange = Exchange(client, LocalWeights(state), config.make_partition(), node, config)
    exchange.join()
    tokens = config.tokens_per_step // config.nodes
    return lambda round: asdict(exchange.run_round(round, config.sync.interval_steps * (round + 1), tokens))


_EXCHANGES = {"naive": _join_naive, "ours": _join_ours}


def memory_bytes(pid: int | str, field: str) -> int:
    """A line of /proc/PID/status, such as VmRSS or VmHWM."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/status has no {field}")


def reset_peak(pid: int | str) -> None:
    """Let VmHWM begin again at what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def base_bytes(protocol: Protocol) -> int:
    """Resident memory of a server process that has imported all it needs, and has no model."""
    code = f"import {_SERVERS[protocol][0]}; print(open('/proc/self/status').read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024
