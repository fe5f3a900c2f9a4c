"""One training participant: ``python -m spes_core.node RUN.json --node N``.

The edge where configuration, data, model, optimizer and network are wired together. Exit status: 0 when every step
was taken, 1 on a failure, 2 on bad configuration; the last line on stderr then says what was wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
from torch import Tensor

from spes_core.address import read_address
from spes_core.checkpoint import model_metadata, save_weights
from spes_core.config import RunConfig, RunFile, digest
from spes_core.data.batches import TokenSource
from spes_core.errors import ConfigError, Problem, SpesError
from spes_core.events import EventWriter
from spes_core.initial import fill, initial_weights
from spes_core.model import counting
from spes_core.model.decoder import Decoder
from spes_core.processlife import die_with_parent
from spes_core.protocol.client import SyncClient
from spes_core.train import parallel
from spes_core.train.allocator import keep_freed_memory
from spes_core.train.exchange import Exchange
from spes_core.train.loop import Place, Training


def main(argv: list[str] | None = None) -> int:
    """Run one participant to its end; the return value is the exit status."""
    parser = argparse.ArgumentParser(prog="python -m spes_core.node", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run.json of the trial")
    parser.add_argument("--node", type=int, default=0, help="index of this node, from 0 (torchrun ranks set their own)")
    parser.add_argument(
        "--die-with-parent", action="store_true", help="end when the process that started this one ends"
    )
    arguments = parser.parse_args(argv)
    if arguments.die_with_parent:
        die_with_parent()
    try:
        run_node(RunFile.load(arguments.run), arguments.run.parent, arguments.node)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SpesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run_node(run: RunFile, trial_dir: Path, node: int) -> None:
    """Train as node ``node`` of the trial in ``trial_dir``. Raises SpesError."""
    config = run.config
    if config.sync.exchange == "gradients":
        node = parallel.global_rank()
    if not 0 <= node < config.world_size:
        raise ConfigError([Problem("--node", f"({node}) must be from 0 to nodes − 1 ({config.world_size - 1})")])
    torch.set_num_threads(run.threads)
    torch.manual_seed(config.seed)
    device = choose_device(run, node)
    keep_freed_memory()
    events = EventWriter(trial_dir / "events" / f"node-{node}.jsonl")
    try:
        decoder = build_decoder(config, node, device)
        write_start(events, decoder, node, device, run.threads)
        if config.sync.exchange == "rounds":
            _train_in_rounds(run, trial_dir, node, decoder, events, device)
        elif config.sync.exchange == "gradients":
            _train_in_group(run, trial_dir, decoder, events, device)
        else:
            place = Place(node, config.nodes, 0, 1)
            training(run, decoder, events, place, device, exchange=None).run()
            save_final(run, trial_dir, decoder.tensors(), f"final-node-{node}.safetensors")
    finally:
        events.close()


def training(
    run: RunFile,
    decoder: Decoder,
    events: EventWriter,
    place: Place,
    device: torch.device,
    *,
    exchange: Exchange | None,
) -> Training:
    """The training run of one participant over the corpus of ``run``."""
    source = TokenSource(Path(run.data_dir), run.config.data, run.config.seed)
    return Training(run.config, decoder, source, events, place, exchange=exchange, device=device)


def build_decoder(config: RunConfig, node: int, device: torch.device) -> Decoder:
    """The decoder of one node with its initial weights, which are the same on all nodes."""
    partition = config.make_partition()
    experts = partition.experts_by_node[node // config.parallel.ranks_per_node]
    decoder = Decoder(config.model, experts, compute=config.compute, frozen=config.frozen)
    fill(decoder, initial_weights(config))
    return decoder.to(device)


def choose_device(run: RunFile, node: int = 0) -> torch.device:
    """The device that a run file asks for. Raises ConfigError when it asks for GPUs and there are too few.

    All processes of a run decide alike, and all arms of a study have equally many processes.
    """
    gpus, processes = torch.cuda.device_count(), run.config.world_size
    shares = run.config.sync.exchange != "gradients"
    if run.device == "cuda" and gpus < (1 if shares else processes):
        need = "a GPU" if shares else f"a GPU for each of the {processes} processes of its group"
        message = f'("cuda") needs {need}, and there are {gpus}; use "auto" or "cpu"'
        raise ConfigError([Problem("launcher.device", message)])
    if run.device == "cpu" or (run.device == "auto" and gpus < processes):
        return torch.device("cpu")
    device = torch.device("cuda", (parallel.local_rank() or node) % gpus)
    torch.cuda.set_device(device)
    return device


def write_start(events: EventWriter, decoder: Decoder, node: int, device: torch.device, threads: int) -> None:
    """Record who trains what, on what."""
    trained = decoder.trained_experts
    counts = counting.parameter_counts(decoder.config, trained)
    process = psutil.Process()
    events.write(
        "start",
        node=node,
        rank=parallel.global_rank(),
        pid=process.pid,
        launched_at_s=process.create_time(),
        ready_at_s=time.time(),
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        threads=threads,
        torch_version=torch.__version__,
        trained_experts=list(trained),
        parameters_total=counts.total,
        parameters_trained=counts.trained,
    )


def save_final(run: RunFile, trial_dir: Path, tensors: Mapping[str, Tensor], name: str) -> None:
    """Keep the trained weights of the trial, with what they are and where they come from."""
    config = run.config
    origin = {
        "trial": run.trial,
        "config_digest": digest(config),
        "tokens": str(config.total_steps * config.tokens_per_step),
    }
    save_weights(trial_dir / "weights" / name, tensors, origin | model_metadata(config.model))


def _train_in_rounds(
    run: RunFile, trial_dir: Path, node: int, decoder: Decoder, events: EventWriter, device: torch.device
) -> None:
    config = run.config
    address = read_address(run.server_address, trial_dir)
    with SyncClient(address, config, node) as client:
        exchange = Exchange(client, decoder, config.make_partition(), node, config)
        if (round := exchange.join()) != 0:
            raise SpesError(
                f"node {node} joined at round {round}, but a node can only start at round 0; start the trial anew"
            )
        place = Place(node, config.nodes, node, config.nodes)
        training(run, decoder, events, place, device, exchange=exchange).run()
    if node == 0:
        save_final(run, trial_dir, decoder.tensors(), "final.safetensors")


def _train_in_group(run: RunFile, trial_dir: Path, decoder: Decoder, events: EventWriter, device: torch.device) -> None:
    config = run.config
    group = parallel.Group(device, config.world_size)
    group.shard(decoder)
    place = Place(group.rank, group.size, group.rank, group.size)
    training(run, decoder, events, place, device, exchange=None).run()
    per_step = counting.collective_bytes_per_step(config.model, group.size)
    events.write("collective", steps=config.total_steps, bytes_sent=per_step * config.total_steps, basis="ring formula")
    gathered = group.gather(decoder)
    if gathered is not None:
        save_final(run, trial_dir, gathered.tensors(), "final.safetensors")
    group.barrier()
    group.close()


if __name__ == "__main__":
    sys.exit(main())
