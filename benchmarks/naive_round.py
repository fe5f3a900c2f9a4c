"""A naive full-state round, for comparison: whole states as one pickled message each, averaged by a server, polled for.

    python -m benchmarks.naive_round RUN.json         the server; `NaiveExchange` is a node's side

What published code for such training does: a node serialises all that it trains (torch.save), sends it as one protobuf
message, asks every 50 ms whether the round is done, and downloads the whole model. The server decodes every state when
it comes, keeps all, takes the mean of shared tensors and each expert from its owner, merges, and serialises the whole
model. Messages are unpickled: never let such a server listen to anyone else.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf.wrappers_pb2 import BytesValue
from torch import Tensor
from torch.nn.functional import cosine_similarity

from spes_core import schedules
from spes_core.address import address_file
from spes_core.config import RunConfig
from spes_core.names import expert_tensor, parse_expert
from spes_core.processlife import die_with_parent
from spes_core.runfile import RunFile

State = dict[str, Tensor]
POLL_S = 0.05
OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
_SERVICE = "naive.Sync"


@dataclass
class NaiveReport:
    """Bytes and times of one node's round."""

    uplink_payload_bytes: int
    downlink_payload_bytes: int
    serialise_s: float
    transfer_s: float
    wait_s: float


class NaiveExchange:
    """A node's side: upload, poll, download, adopt."""

    def __init__(self, address: str, config: RunConfig, node: int, state: State) -> None:
        self._node, self._state = node, state
        self._trained = [name for name in state if config.make_partition().trains(node, name)]
        channel = grpc.insecure_channel(address, options=OPTIONS)
        encode, decode = BytesValue.SerializeToString, BytesValue.FromString
        self._upload, self._is_done, self._download = (
            channel.unary_unary(f"/{_SERVICE}/{method}", encode, decode) for method in ("Upload", "IsDone", "Download")
        )

    def run_round(self, round: int) -> NaiveReport:
        """One round, to the adopted global weights."""
        clock = time.perf_counter
        stamps = [clock()]
        sent = serialised({"node": self._node, "state": {name: self._state[name] for name in self._trained}})
        stamps.append(clock())
        self._upload(BytesValue(value=sent), wait_for_ready=True)
        stamps.append(clock())
        while not self._is_done(BytesValue(value=b"%d" % round)).value:
            time.sleep(POLL_S)
        stamps.append(clock())
        received = self._download(BytesValue()).value
        stamps.append(clock())
        for name, value in deserialised(received).items():
            self._state[name].copy_(value)
        stamps.append(clock())
        serialise_s, sending_s, wait_s, receiving_s, adopting_s = (
            after - before for before, after in itertools.pairwise(stamps)
        )
        return NaiveReport(len(sent), len(received), serialise_s + adopting_s, sending_s + receiving_s, wait_s)


class NaiveServer(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The server's side: keeps the state of every node and the serialised result of the last round."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._partition = config, config.make_partition()
        self._lock = threading.Lock()
        self._states: dict[int, State] = {}
        self._rounds = 0
        self._result = BytesValue()
        methods = {"Upload": self._upload, "IsDone": self._is_done, "Download": lambda request, context: self._result}
        self._handlers = {
            f"/{_SERVICE}/{name}": grpc.unary_unary_rpc_method_handler(
                method, BytesValue.FromString, BytesValue.SerializeToString
            )
            for name, method in methods.items()
        }

    def service(self, handler_call_details: Any) -> Any:
        """The method that a call asks for."""
        return self._handlers.get(handler_call_details.method)

    def _upload(self, request: BytesValue, context: Any) -> BytesValue:
        message = deserialised(request.value)
        with self._lock:
            self._states[message["node"]] = message["state"]
            if len(self._states) == self._config.nodes:
                threading.Thread(target=self._close).start()
        return BytesValue()

    def _is_done(self, request: BytesValue, context: Any) -> BytesValue:
        return BytesValue(value=b"1" if self._rounds > int(request.value) else b"")

    def _close(self) -> None:
        model = self._mean()
        step = self._rounds + 1
        if alpha := schedules.due_merge_alpha(self._config.merge, step - 1, step):
            merge(model, self._config, alpha)
        self._result = BytesValue(value=serialised(model))
        self._states = {}
        self._rounds += 1

    def _mean(self) -> State:
        names = list(dict.fromkeys(name for node in sorted(self._states) for name in self._states[node]))
        return {
            name: torch.stack([self._states[node][name] for node in self._partition.trainers(name)]).mean(0)
            for name in names
        }


def merge(model: State, config: RunConfig, alpha: float) -> None:
    """Pull every expert to the mean of its nearest, layer by layer, one cosine at a time."""
    gate = config.model.expert_hidden
    for layer in sorted({parsed[0] for name in model if (parsed := parse_expert(name))}):
        experts = range(config.model.num_experts)
        names = [[expert_tensor(layer, expert, matrix) for matrix in ("gate_up", "down")] for expert in experts]
        gates = [model[name[0]][:gate].flatten() for name in names]
        before = [{matrix: model[matrix].clone() for matrix in name} for name in names]
        for expert in experts:
            cosines = torch.stack([cosine_similarity(gates[expert], other, dim=0) for other in gates])
            cosines[expert] = -2
            nearest = cosines.topk(config.merge.num_neighbours).indices.tolist()
            for matrix, name in enumerate(names[expert]):
                mean = torch.stack([before[other][names[other][matrix]] for other in nearest]).mean(0)
                model[name] = before[expert][name] + alpha * (mean - before[expert][name])


def serialised(message: Any) -> bytes:
    """The message as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return buffer.getvalue()


def deserialised(data: bytes) -> Any:
    """Unpickles the message; trusts it."""
    return torch.load(io.BytesIO(data), weights_only=False)


def main(arguments: list[str] | None = None) -> None:
    """Serve until killed; the address goes to the same file as the real server's."""
    parser = argparse.ArgumentParser(description="A naive parameter server, for comparison only.")
    parser.add_argument("run", type=Path)
    path: Path = parser.parse_args(arguments).run
    die_with_parent()
    config = RunFile.load(path).config
    torch.set_num_threads(1)
    server = grpc.server(ThreadPoolExecutor(2 * config.nodes + 8), options=OPTIONS)
    server.add_generic_rpc_handlers((NaiveServer(config),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    temporary = path.parent / f"{address_file()}.tmp"
    temporary.write_text(f"{address}\n{os.getpid()}\n", encoding="utf-8")
    temporary.replace(path.parent / address_file())
    server.wait_for_termination()


if __name__ == "__main__":
    sys.exit(main())
