"""One training participant: ``python -m spes_core.node RUN.json --node N``, or ``... node-N.invite`` (`participant`).

The edge where configuration, data, model, optimizer and network are wired together. Exit status: 0 when every step
was taken, 1 on a failure, 2 on bad configuration, 130 interrupted; the last line on stderr then says what was wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from spes_core import snapshots, torchrun
from spes_core.checkpoint import save_final
from spes_core.config import RunConfig
from spes_core.data.batches import TokenSource
from spes_core.errors import ConfigError, Problem, SpesError, file_failure
from spes_core.events import Events, EventWriter, NoEvents
from spes_core.initial import fill, initial_weights
from spes_core.invitation import exposed, is_invitation
from spes_core.model import counting
from spes_core.model.decoder import Decoder
from spes_core.participant import settle
from spes_core.processlife import die_with_parent, end
from spes_core.protocol.connect import connect
from spes_core.runfile import RunFile
from spes_core.sync.codec import Values
from spes_core.train import parallel
from spes_core.train.allocator import keep_freed_memory
from spes_core.train.exchange import Exchange, FollowingExchange, LeadingExchange
from spes_core.train.loop import Place, Training
from spes_core.train.parallel import Group, Piece
from spes_core.train.resume import Checkpoints
from spes_core.train.sharded import ShardedExchange
from spes_core.train.surroundings import RoundExchange
from spes_core.train.weights import DividedWeights, LocalWeights, follow


def main(argv: list[str] | None = None) -> int:
    """Run one participant to its end; the return value is the exit status."""
    parser = argparse.ArgumentParser(prog="python -m spes_core.node", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run.json of the trial, or an invitation, node-<n>.invite")
    parser.add_argument("--node", type=int, default=0, help="index of this node, from 0")
    parser.add_argument(
        "--die-with-parent", action="store_true", help="end when the process that started this one ends"
    )
    parser.add_argument("--allow-plaintext", action="store_true", help="call a server elsewhere unencrypted")
    invited = parser.add_argument_group("with an invitation")
    invited.add_argument("--data", type=Path, metavar="CORPUS_FOLDER", help="tokenized text (default: prepared here)")
    invited.add_argument(
        "--init", type=Path, metavar="FILE", help="the first weights, where the run has a file of them"
    )
    invited.add_argument(
        "--folder", type=Path, metavar="DIR", help="what is written (default: ./spes-<trial>-node-<n>)"
    )
    arguments = parser.parse_args(argv)
    if arguments.die_with_parent:
        die_with_parent()
    try:
        arguments.run, arguments.node = _settled(arguments)
        run = RunFile.load(arguments.run)
        run = replace(run, allow_plaintext=run.allow_plaintext or arguments.allow_plaintext)
        run_node(run, arguments.run.parent, arguments.node)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SpesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {file_failure(arguments.run.parent, error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


def _become_ranks(run_file: Path, node: int, *, allow_plaintext: bool) -> None:
    """Become the torchrun of a node of several ranks; returns where a node is one process, and in its ranks."""
    ranks = RunFile.load(run_file).config.parallel.ranks_per_node
    if ranks == 1 or "RANK" in os.environ:
        return
    package, name = Path(__file__).absolute().parent, f"node-{node}"
    torchrun.rendezvous(run_file.parent, name).unlink(missing_ok=True)
    argv = torchrun.group_argv(sys.executable, package, run_file.parent, ranks, name)
    plaintext = ("--allow-plaintext",) if allow_plaintext else ()
    path = os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **torchrun.group_environment(), "PYTHONPATH": path}
    os.execve(argv[0], [*argv, "--node", str(node), *plaintext], environment)


def _settled(arguments: argparse.Namespace) -> tuple[Path, int]:
    """run.json and the node: as given, or as an invitation leads to them. Raises ConfigError.

    Invited to a node of several ranks, this process becomes their torchrun instead, and does not return.
    """
    given = {name: getattr(arguments, name) for name in ("data", "init", "folder")}
    if is_invitation(arguments.run):
        settled = settle(arguments.run, **given)
        if note := exposed(arguments.run):
            print(f"note: {note}", file=sys.stderr)
        _become_ranks(*settled, allow_plaintext=arguments.allow_plaintext)
        return settled
    if named := next((name for name, value in given.items() if value is not None), None):
        message = f'("{given[named]}") belongs to an invitation, and {arguments.run} is none; leave it out'
        raise ConfigError([Problem(f"--{named}", message)])
    return arguments.run, arguments.node


def run_node(run: RunFile, trial_dir: Path, node: int) -> None:
    """Train as node ``node`` of the trial in ``trial_dir``. Raises SpesError.

    With sync.exchange "gradients" one group is divided into participants by rank; where several hosts share it,
    ``node`` is the first of this one, elsewhere unused.
    """
    config, by_gradients = run.config, run.config.sync.exchange == "gradients"
    if not 0 <= node < config.nodes:
        raise ConfigError([Problem("--node", f"({node}) must be from 0 to nodes − 1 ({config.nodes - 1})")])
    first_rank = node * config.parallel.ranks_per_node if run.meeting is not None else 0
    node, rank = 0 if by_gradients else node, parallel.global_rank(first_rank)
    torch.set_num_threads(run.threads)
    torch.manual_seed(config.seed)
    device = choose_device(run, node * config.group_size + parallel.local_rank())
    keep_freed_memory()
    in_group = by_gradients or config.group_size > 1
    group = Group(device, config, trial_dir, first_rank, run.meeting) if in_group else None
    records = by_gradients or rank == 0
    participant = snapshots.node_name(config, node, rank)
    agree = None if group is None or run.meeting is None else group.newest_common
    checkpoints = Checkpoints(config, trial_dir, participant, agree)
    path = trial_dir / "events" / f"{participant}.jsonl"
    events: Events = EventWriter(path, checkpoints.events_bytes) if records else NoEvents()
    try:
        experts = checkpoints.experts or config.make_partition().experts_by_node[node]
        model = build_model(config, experts, device, group)
        write_start(events, model.decoder, rank if by_gradients else node, rank, device, run.threads)
        if config.sync.exchange == "rounds":
            _train_in_rounds(run, trial_dir, node, model, events, device, checkpoints)
        else:
            training(run, model, events, node, device, checkpoints, exchange=None).run()
        if by_gradients:
            write_collective(events, config)
        _save_final(run, trial_dir, node, model)
    finally:
        events.close()
    if group is not None:
        group.close()


@dataclass(frozen=True)
class Model:
    """A decoder, and the weights that lie in it."""

    decoder: Decoder
    weights: LocalWeights | DividedWeights
    group: Group | None
    """The ranks that divide the decoder; None when this process has all of it."""
    pieces: list[Piece]
    """This rank's parts of the tensors; empty without a group."""


def training(
    run: RunFile,
    model: Model,
    events: Events,
    node: int,
    device: torch.device,
    checkpoints: Checkpoints,
    *,
    exchange: RoundExchange | None,
) -> Training:
    """The training run of one participant over the corpus of ``run``."""
    source = TokenSource(Path(run.data_dir), run.config.data, run.config.seed)
    place = Place.of(run.config, node, 0 if model.group is None else model.group.rank)
    ranks = None if run.config.sync.exchange == "gradients" else model.group
    return Training(
        run.config,
        model.decoder,
        source,
        events,
        place,
        exchange=exchange,
        device=device,
        ranks=ranks,
        checkpoints=checkpoints,
    )


def build_model(config: RunConfig, experts: Sequence[int], device: torch.device, group: Group | None) -> Model:
    """The model of a node that trains ``experts``, with its initial weights, which are the same on all nodes.

    In a group the decoder gets its memory only after it is divided, and its values tensor by tensor: no rank ever holds
    more than its part and one whole tensor.
    """
    if group is None:
        decoder = build_decoder(config, experts, device)
        return Model(decoder, LocalWeights(decoder.tensors()), None, [])
    with torch.device("meta"):
        decoder = Decoder(config.model, experts, compute=config.compute, frozen=config.frozen)
    group.shard(decoder)
    decoder.to_empty(device=device)
    pieces, initial = group.pieces(decoder), initial_weights(config)
    for piece in pieces:
        parallel.fill(piece, initial(piece.name), group.rank)
    shapes = counting.tensor_shapes(config.model)
    return Model(decoder, DividedWeights(group, pieces, shapes), group, pieces)


def build_decoder(config: RunConfig, experts: Sequence[int], device: torch.device) -> Decoder:
    """The undivided decoder of a node that trains ``experts``, with its initial weights."""
    decoder = Decoder(config.model, experts, compute=config.compute, frozen=config.frozen)
    fill(decoder, initial_weights(config))
    return decoder.to(device)


def choose_device(run: RunFile, index: int) -> torch.device:
    """The device that a run file asks for; processes are dealt to GPUs by their ``index`` over all nodes.

    All processes of a run decide alike, and all arms of a study have equally many processes. Raises ConfigError when it
    asks for GPUs and there are too few.
    """
    gpus, processes = torch.cuda.device_count(), run.config.world_size
    ranks = parallel.local_size()
    if run.device == "cuda" and gpus < ranks:
        message = (
            f'("cuda") needs {ranks} GPUs for the ranks of one group here, and there are {gpus}; use "auto" or "cpu"'
        )
        raise ConfigError([Problem("launcher.device", message)])
    if run.device == "cpu" or (run.device == "auto" and gpus < processes):
        return torch.device("cpu")
    device = torch.device("cuda", index % gpus)
    torch.cuda.set_device(device)
    return device


def write_start(events: Events, decoder: Decoder, node: int, rank: int, device: torch.device, threads: int) -> None:
    """Record who trains what, on what."""
    trained = decoder.trained_experts
    counts = counting.parameter_counts(decoder.config, trained)
    process = psutil.Process()
    events.write(
        "start",
        node=node,
        rank=rank,
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


def write_collective(events: Events, config: RunConfig) -> None:
    """Record what one rank has sent in collectives, by arithmetic."""
    sent = config.total_steps * counting.collective_bytes_per_step(config.model, config.group_size)
    events.write("collective", steps=config.total_steps, bytes_sent=sent, basis="ring formula")


def _train_in_rounds(
    run: RunFile,
    trial_dir: Path,
    node: int,
    model: Model,
    events: Events,
    device: torch.device,
    checkpoints: Checkpoints,
) -> None:
    config, group, weights = run.config, model.group, model.weights

    def train(exchange: RoundExchange) -> None:
        training(run, model, events, node, device, checkpoints, exchange=exchange).run()

    if group is not None and group.rank > 0:
        train(FollowingExchange(group, model.pieces))
        return
    exact, experts = flat_initial_weights(config), model.decoder.trained_experts
    with ExitStack() as stack:
        clients = [stack.enter_context(client) for client in connect(run, trial_dir, node)]
        if len(clients) > 1:
            tensors = model.decoder.tensors()
            sharded = ShardedExchange(clients, tensors, node, config, exact=exact, experts=experts)
            train(stack.enter_context(sharded))
            return
        exchange = Exchange(clients[0], weights, config.make_partition(), node, config, exact=exact, experts=experts)
        train(LeadingExchange(exchange, weights) if isinstance(weights, DividedWeights) else exchange)


def flat_initial_weights(config: RunConfig) -> Callable[[str], Values]:
    """A function from a tensor's name to its initial values, flat float32."""
    initial = initial_weights(config)

    def flat(name: str) -> Values:
        values: Values = initial(name).reshape(-1).numpy()
        return values

    return flat


def _save_final(run: RunFile, trial_dir: Path, node: int, model: Model) -> None:
    """Store the trained weights: one file, or without any exchange one of each node.

    With rounds the server does: it has them exactly, and need not bring ranks together.
    """
    if run.config.sync.exchange == "rounds":
        return
    is_own = run.config.sync.exchange == "none"
    name = f"final-node-{node}.safetensors" if is_own else "final.safetensors"
    if model.group is None:
        save_final(run, trial_dir, model.decoder.tensors(), name)
    elif isinstance(model.weights, DividedWeights) and model.group.rank == 0:
        tensors = model.weights.tensors()
        model.weights.lead(lambda: save_final(run, trial_dir, tensors, name))
    else:
        follow(model.group, model.pieces)


if __name__ == "__main__":
    end(main())
