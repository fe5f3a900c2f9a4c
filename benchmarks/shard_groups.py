"""The processes of `benchmarks.shards`: servers on hosts of a testbed, and nodes outside, taken through rounds."""

from __future__ import annotations

import hashlib
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import torch

from spes_core.config import RunConfig
from spes_core.initial import initial_weights
from spes_core.model.counting import tensor_shapes
from spes_core.processlife import die_with_parent
from spes_core.protocol.connect import connect
from spes_core.runfile import RunFile
from spes_core.train.exchange import Exchange
from spes_core.train.sharded import ShardedExchange
from spes_core.train.weights import LocalWeights
from tests.multihost.testbed import Testbed

_PATIENCE_S = 300.0


class Group:
    """Servers on hosts and nodes outside; a context manager."""

    def __init__(self, bed: Testbed, config: RunConfig, first_port: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="spes-shards-"))
        hosts = bed.hosts[: config.server.shards]
        addresses = tuple(f"{bed.address(host)}:{first_port}" for host in hosts)
        run = RunFile(
            trial="benchmark",
            config=config,
            data_dir="none",
            server_address=addresses[0],
            shard_addresses=addresses,
            device="cpu",
            allow_plaintext=True,
        )
        run.save(self._folder / "run.json")
        self._servers = [self._serve(bed, host, shard) for shard, host in enumerate(hosts)]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.shard_groups"])
        self._pipes, self._nodes = [], []
        for node in range(config.nodes):
            here, there = context.Pipe()
            process = context.Process(target=node_main, args=(there, self._folder, node), daemon=True)
            process.start()
            self._nodes.append(process)
            self._pipes.append(here)
        self._answers()

    def _serve(self, bed: Testbed, host: str, shard: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "spes_core.server", str(self._folder / "run.json"), "--shard", str(shard)]
        with (self._folder / f"server-{shard}.log").open("wb") as log:
            return subprocess.Popen(bed.inside(host, *command), stdout=log, stderr=log)

    def run_round(self, round: int) -> tuple[float, str]:
        """Seconds until the last node is done, and a digest of all weights then."""
        began_s = time.monotonic() + 0.02
        for pipe in self._pipes:
            pipe.send((round, began_s))
        ended = self._answers()
        assert len({digest for _, digest in ended}) == 1, "nodes hold different weights"
        return max(ended_s for ended_s, _ in ended) - began_s, ended[0][1]

    def _answers(self) -> list[Any]:
        found = []
        for pipe in self._pipes:
            if not pipe.poll(_PATIENCE_S):
                logs = "".join(path.read_text() for path in self._folder.glob("*.log"))
                raise TimeoutError(
                    f"a node did not answer within {_PATIENCE_S:g} s; the servers said: {logs or 'nothing'}"
                )
            found.append(pipe.recv())
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.kill()
            node.join()
        for server in self._servers:
            server.kill()
            server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def node_main(pipe: Any, folder: Path, node: int) -> None:
    """A node's process: joins, then exchanges when it is told to."""
    die_with_parent()
    torch.set_num_threads(1)
    run = RunFile.load(folder / "run.json")
    config, initial = run.config, initial_weights(run.config)
    tensors = {name: initial(name).contiguous() for name in tensor_shapes(config.model)}
    clients = connect(run, folder, node)
    if len(clients) > 1:
        exchange: Any = ShardedExchange(clients, tensors, node, config)
    else:
        exchange = Exchange(clients[0], LocalWeights(tensors), config.make_partition(), node, config)
    exchange.join()
    pipe.send(None)
    while True:
        round, began_s = pipe.recv()
        for name, tensor in tensors.items():
            if config.make_partition().trains(node, name):
                tensor.mul_(1 + 1e-3 * (node + 1))
        time.sleep(max(0.0, began_s - time.monotonic()))
        exchange.run_round(round, round + 1, config.tokens_per_step // config.nodes)
        ended_s, digest = time.monotonic(), hashlib.sha256()
        for tensor in tensors.values():
            digest.update(tensor.numpy().data)
        pipe.send((ended_s, digest.hexdigest()))
