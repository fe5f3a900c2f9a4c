"""The parameter server process: `python -m spes_core.server RUN.json`. Around it two commands: `credentials DIR` makes
certificates and a join token (`protocol.credentials`), `status ADDR` asks a server (`protocol.status`). With
`--credentials DIR` it first writes an invitation for each node there (`invitation`).

Writes its address and process id to server.address, its events to events/server.jsonl, what nodes upload to rounds/
and the final weights to weights/final.safetensors, all beside RUN.json. Started again, it goes on from its newest
checkpoint and the uploads stored since. Where server.shards is S, S processes (`--shard 0` and so on) each do so for a
part of the tensors, under names of their own (server-0-of-2, rounds-0-of-2); the last one makes the final weights.

Ends with 0 when every round is closed and delivered, 1 when a round fails, when SIGTERM stops it before that or a
checkpoint is damaged, 2 when it cannot start.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from spes_core import snapshots
from spes_core.address import address_file, is_host_and_port
from spes_core.checkpoint import save_final
from spes_core.config import RunConfig
from spes_core.errors import ConfigError, DataError, Problem, RoundFailed, file_failure
from spes_core.events import EventWriter
from spes_core.initial import initial_weights
from spes_core.invitation import invite
from spes_core.model.counting import tensor_shapes, tensors_by_shard
from spes_core.processlife import die_with_parent, end, rss_peak_bytes
from spes_core.protocol import channel, credentials, status
from spes_core.protocol.servicer import Opening, SyncServicer, num_threads
from spes_core.runfile import RunFile
from spes_core.schedules import checkpoint_steps, merge_steps, round_steps
from spes_core.sync.codec import Values
from spes_core.sync.global_state import GlobalState
from spes_core.sync.ledger import FRESH, Standing
from spes_core.sync.messages import Schema, schema_of
from spes_core.sync.parameter_server import ParameterServer
from spes_core.tensorfile import read_tensors, write_tensors
from spes_core.train.allocator import return_freed_memory
from spes_core.weightsfile import FINAL, join_parts, part_file

_FAREWELL_S = 5.0
"""How long answers that are under way may take once the server ends."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments and (command := _COMMANDS.get(arguments[0])):
        return command(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m spes_core.server",
        description="The parameter server of one run.",
        epilog="Further commands: credentials DIR, status ADDR; each has a --help of its own.",
    )
    parser.add_argument("run", type=Path, metavar="RUN.json", help="what to run; its folder takes events and address")
    parser.add_argument("--shard", type=int, default=0, metavar="N", help="which of server.shards (default: 0)")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the parent process ends")
    parser.add_argument("--allow-plaintext", action="store_true", help="listen beyond this machine unencrypted")
    by_hand = parser.add_argument_group("participants with no account here")
    by_hand.add_argument("--credentials", type=Path, metavar="DIR", help="make certificates and invitations there")
    by_hand.add_argument("--listen", metavar="HOST:PORT", help="where to listen (default: as run.json says)")
    by_hand.add_argument("--public", metavar="HOST:PORT", help="as participants call it (default: as --listen)")
    options = parser.parse_args(arguments)
    if options.die_with_parent:
        die_with_parent()
    try:
        run = RunFile.load(options.run)
        run = replace(run, allow_plaintext=run.allow_plaintext or options.allow_plaintext)
        run = _of_shard(run, options.shard)
        run = _with_invitations(run, options.credentials, options.listen, options.public)
        check_servable(run)
        torch.set_num_threads(run.threads)
        return_freed_memory()
        serve(run, options.run.parent, options.shard)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RoundFailed, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {file_failure(options.run.parent, error)}", file=sys.stderr)
        return 1
    return 0


def serve(run: RunFile, folder: Path, shard: int = 0) -> None:
    """Serve the run, or a shard's part of its tensors, to its end.

    Raises ConfigError when the address cannot be used, RoundFailed when a round fails.
    """
    listening = Listening(run, folder)
    config, names = run.config, tensors_by_shard(run.config)[shard]
    name = config.servers[shard]
    # Takes the lock of the server's files: before it nothing of them is touched.
    events = EventWriter(folder / "events" / f"{name}.jsonl")
    # A former server's address must not lead this run's nodes astray.
    (folder / address_file(name)).unlink(missing_ok=True)
    shapes = {tensor: shape for tensor, shape in tensor_shapes(config.model).items() if tensor in names}
    schema, due = schema_of(shapes), checkpoint_steps(config)
    standing, first_value = _take_up(config, folder, name, schema)
    events.write("start", pid=os.getpid())
    if standing.step:
        events.write("resume", step=standing.step, round=standing.round)
    rounds_folder = folder / f"rounds{name.removeprefix('server')}"
    core = ParameterServer(config, schema, first_value, events.write, rounds_folder, standing, due)
    with _StopSignal(core):
        try:
            listening.open(core)
            _write_atomically(folder / address_file(name), f"{listening.address}\n{os.getpid()}\n")
            events.write("listening", address=listening.address)
            core.run(lambda standing: _store(config, folder, name, core.state, standing, events.size_bytes))
            _save_final(run, folder, name, schema, core.state)
            core.journal.prune(before=len(round_steps(config)) + 1)
        finally:
            listening.close()
            rounds = core.rounds_closed
            steps = round_steps(config)[:rounds]
            merges = len(set(merge_steps(config)) & set(steps))
            events.write("end", rounds=rounds, merges=merges, rss_peak_bytes=rss_peak_bytes())
            events.close()


def check_servable(run: RunFile) -> None:
    """Raises ConfigError when this run needs no server, or its address must not be served without encryption."""
    exchange, address = run.config.sync.exchange, run.server_address
    if exchange != "rounds":
        raise _wrong("sync.exchange", f'("{exchange}") must be "rounds" for a server to have work')
    if not is_host_and_port(address):
        raise _wrong("server_address", f'("{address}") must be host:port, for instance 127.0.0.1:0')
    if run.credentials is None:
        channel.require_private("server_address", address, run.allow_plaintext)


class Listening:
    """The open port of a run: says from the start that it is not ready, and serves once there is a core."""

    def __init__(self, run: RunFile, folder: Path) -> None:
        """Raises ConfigError when the port cannot be used."""
        self._config, self._credentials = run.config, credentials.of_server(run.credentials, folder)
        # Threads of the health service; the requests of nodes have their own.
        self._server = grpc.server(ThreadPoolExecutor(4), options=channel.OPTIONS)
        port = channel.bind(self._server, run.server_address, self._credentials, run.allow_plaintext)
        self.address = f"{run.server_address.rpartition(':')[0]}:{port}"
        self._opening, self._health = Opening(), health.HealthServicer()
        self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        self._server.add_generic_rpc_handlers((self._opening,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.start()

    def open(self, core: ParameterServer) -> None:
        """Serve the core."""
        threads = ThreadPoolExecutor(num_threads(self._config.nodes), thread_name_prefix="request")
        token, chunk_bytes = self._credentials.token, self._config.wire.chunk_bytes
        self._opening.servicer = SyncServicer(core, chunk_bytes, token, threads)
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Serve nothing new, and let answers that are under way go out."""
        self._health.enter_graceful_shutdown()
        self._server.stop(_FAREWELL_S).wait()


def _of_shard(run: RunFile, shard: int) -> RunFile:
    """The run as one of its servers serves it: with its own address."""
    shards = run.config.server.shards
    if not 0 <= shard < shards:
        raise _wrong("--shard", f"({shard}) must be from 0 to server.shards - 1 ({shards - 1})")
    return replace(run, server_address=run.address_of(shard))


def _with_invitations(run: RunFile, folder: Path | None, listen: str | None, public: str | None) -> RunFile:
    """The run as it is served; with a folder of credentials every node has an invitation there."""
    if listen is not None and not is_host_and_port(listen):
        raise _wrong("--listen", f'("{listen}") must be host:port, for instance 0.0.0.0:5200')
    run = replace(run, server_address=listen or run.server_address)
    if folder is None:
        if public is not None:
            raise _wrong(
                "--public", "is written into invitations: give the folder that takes them as --credentials DIR"
            )
        return run
    if (shards := run.config.server.shards) > 1:
        raise _wrong("server.shards", f"({shards}) must be 1 with --credentials: an invitation names one server")
    check_servable(replace(run, credentials=str(folder)))
    run, lines = invite(run, folder, public)
    print("\n".join(lines), flush=True)
    return run


def _wrong(path: str, message: str) -> ConfigError:
    return ConfigError([Problem(path, message)])


def _initial(config: RunConfig) -> Callable[[str], Values]:
    initial = initial_weights(config)

    def flat(name: str) -> Values:
        values: Values = initial(name).reshape(-1).numpy()
        return values

    return flat


def _take_up(config: RunConfig, folder: Path, server: str, schema: Schema) -> tuple[Standing, Callable[[str], Values]]:
    """Where the run stands, and the value of each of the server's tensors by name."""
    step = max(snapshots.stored_steps(config, folder, server), default=0)
    if not step:
        return FRESH, _initial(config)
    manifest, path = snapshots.load(folder, server, step)
    stored = dict(read_tensors(path))
    ends = accumulate((spec.num_elements for spec in schema), initial=0)
    start_of = {spec.name: (start, spec.num_elements) for spec, start in zip(schema, ends, strict=False)}
    values: Values = stored["values"].numpy()

    def of_tensor(name: str) -> Values:
        start, size = start_of[name]
        return values[start : start + size]

    kept: dict[str, Values] = {
        name: stored[name].clone().numpy() for name in ("momentum", "residual") if name in stored
    }
    standing = Standing(
        round=manifest.round,
        step=step,
        tokens=manifest.values["tokens"],
        absences=tuple(manifest.values["absences"]),
        **kept,
    )
    return standing, of_tensor


def _store(
    config: RunConfig, folder: Path, server: str, state: GlobalState, standing: Standing, events_bytes: int
) -> None:
    """Store the global weights and what goes with them; all stay as they are meanwhile."""
    arrays = {"values": state.values, "momentum": standing.momentum, "residual": standing.residual}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}
    try:
        snapshots.store(
            config,
            snapshots.folder_of(folder, server),
            lambda path: write_tensors(path, tensors),
            step=standing.step,
            round=standing.round,
            events_bytes=events_bytes,
            values={"tokens": standing.tokens, "absences": standing.absences},
        )
    except OSError as error:
        raise RoundFailed(
            f"the checkpoint after step {standing.step} cannot be stored under {folder}: {error.strerror or error};"
            " mend that (free space, write permission) and start all processes again: they go on from what is stored"
        ) from error


def _save_final(run: RunFile, folder: Path, server: str, schema: Schema, state: GlobalState) -> None:
    """Keep the global weights of the end of the run; of several servers the last one makes one file of them."""
    tensors = {spec.name: torch.from_numpy(state.tensor(index)).view(spec.shape) for index, spec in enumerate(schema)}
    servers = run.config.servers
    if len(servers) == 1:
        save_final(run, folder, tensors, FINAL)
        return
    save_final(run, folder, tensors, part_file(server))
    join_parts(folder / "weights", servers, list(tensor_shapes(run.config.model)))


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


class _StopSignal:
    """While active, SIGTERM and SIGINT end the run as a failure that the nodes are told of."""

    def __init__(self, core: ParameterServer) -> None:
        self._core = core
        self._former: dict[int, Any] = {}

    def __enter__(self) -> _StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._former[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _stop(self, number: int, _: object) -> None:
        self._core.fail(f"the server was stopped ({signal.Signals(number).name})")


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"credentials": credentials.main, "status": status.main}


if __name__ == "__main__":
    end(main())
