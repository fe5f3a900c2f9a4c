"""`python -m workbench.plan STUDY.yaml | --model 7b --nodes 4`: what runs would cost, before anything is paid.

Of a study every trial is listed, with what is done already and why the others will run. Of a preset
(workbench/conf/model) one run is shown in full. Creates nothing, needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from spes_core.config import RunConfig, from_dict
from spes_core.errors import ConfigError
from spes_core.model.counting import MemoryParts, WireBytes, memory, parameter_counts, round_bytes, run_bytes
from spes_core.schedules import merge_steps, round_steps
from workbench.costs import Cost, Machine, cost, with_link
from workbench.errors import StudyError
from workbench.groups import CONF, group_options, wrong_choice
from workbench.terminal import duration, print_table
from workbench.trees import Tree, merge, nest
from workbench.yamlsource import read_yaml

CARDS_GB = (24, 48, 80)
"""Memory of common devices, 1e9 bytes."""
_TOKENS, _SEQUENCE_LENGTH, _SEQUENCES_A_NODE = 10_000_000_000, 2048, 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns 0, or 2 when the input is wrong."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        if (options.model is None) == (options.study is None or "=" in options.study):
            raise StudyError(["name either a study file, or a preset with --model"])
        if options.model is not None:
            overrides = [word for word in (options.study, *options.overrides) if word is not None]
            show_run(options.model, preset_run(options, overrides), _machine(options))
        else:
            show_study(options)
    except StudyError as error:
        for mistake in error.mistakes:
            print(f"error: {mistake}", file=sys.stderr)
        return 2
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


def preset_run(options: argparse.Namespace, overrides: Sequence[str]) -> RunConfig:
    """One run of a preset: a long one on sequences of 2,048 tokens, unless key=value says otherwise."""
    tree: Tree = {}
    for group, name in (("model", options.model), ("method", options.method)):
        if wrong := wrong_choice(group, name):
            raise StudyError([f"--{group} ({name}) {wrong}"])
    model = read_yaml(CONF / "model" / f"{options.model}.yaml").data
    tree["model"] = model
    tree["nodes"], tree["budget_tokens"] = options.nodes, _TOKENS
    tree["data"] = {
        "tokenizer_vocab_size": model["vocab_size"],
        "sequence_length": _SEQUENCE_LENGTH,
        "micro_batch_sequences": 1,
        "global_batch_sequences": _SEQUENCES_A_NODE * options.nodes,
    }
    tree["compute"] = {"precision": "bfloat16"}
    tree = merge(tree, read_yaml(CONF / "method" / f"{options.method}.yaml").data)
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals:
            raise StudyError([f"{text} is not of the form key=value, such as sync.interval_steps=100"])
        tree = merge(tree, nest(path.removeprefix("run."), yaml.safe_load(value)))
    return with_link(from_dict(tree), options.uplink_mbps, options.downlink_mbps, options.rtt_ms)


def show_run(name: str, config: RunConfig, machine: Machine) -> None:
    """Print all that is known of one run."""
    partition = config.make_partition()
    node = max(range(len(partition.experts_by_node)), key=lambda number: len(partition.experts_by_node[number]))
    counts = parameter_counts(config.model, partition.experts_by_node[node])
    parts, needed = memory(config, node), cost(config, machine)
    ranks = f" of {config.parallel.ranks_per_node} devices" if config.parallel.ranks_per_node > 1 else ""
    print(f"{name}, {config.method}, {config.nodes} nodes{ranks}\n")
    print_table(
        "parameters",
        ("total", "active per token", "trained by a node"),
        [(f"{counts.total:,}", f"{counts.active:,}", f"{counts.trained:,}")],
        ("total", "active per token", "trained by a node"),
    )
    print()
    print_table("memory of one process (GB, 1e9 bytes)", *_memory_table(parts))
    print()
    print_table("bytes of one node (GB)", *_bytes_table(config, node))
    print()
    for line in _time_lines(config, machine, needed):
        print(line)


def show_study(options: argparse.Namespace) -> None:
    """Print one line for each trial of a study, with what is done already and why the others will run."""
    from workbench.spec import read_study
    from workbench.study import find_corpora
    from workbench.trials import expand

    study = read_study(Path(options.study), options.overrides)
    variants = expand(study)
    corpora = find_corpora(study, variants)
    machine, rows, hours, price = _machine(options), [], 0.0, 0.0
    for variant in variants:
        config = with_link(variant.config, options.uplink_mbps, options.downlink_mbps, options.rtt_ms)
        needed = cost(config, machine)
        hours, price = hours + needed.gpu_hours, price + (needed.price or 0.0)
        status = _status(study, variant, corpora, Path(options.results) / study.name)
        rows.append([variant.label, *_cells(config, needed), status])
    columns = ("trial", *_COLUMNS, "status")
    print_table(f"{study.name}: {len(rows)} trials", columns, rows, _COLUMNS[:-1])
    paid = "" if options.price is None else f", {price:,.2f} at {options.price:g} an hour"
    print(f"\n{hours:.3g} GPU-hours for all{paid}. {_assumptions(machine)}")


_COLUMNS = (
    *("total", "active", "trained", "memory GB", "up GB/round", "down GB/round", "up GB", "down GB", "merges"),
    *("round s", "utilisation", "GPU-h", "fits GB"),
)


def _cells(config: RunConfig, needed: Cost) -> list[str]:
    partition = config.make_partition()
    node = max(range(len(partition.experts_by_node)), key=lambda number: len(partition.experts_by_node[number]))
    counts = parameter_counts(config.model, partition.experts_by_node[node])
    total_gb = memory(config, node).total_bytes / 1e9
    one, run = round_bytes(config, node, False), run_bytes(config, node)
    fits = [str(card) for card in CARDS_GB if total_gb <= card]
    return [
        *(f"{count:,}" for count in (counts.total, counts.active, counts.trained)),
        f"{total_gb:.3g}",
        *(_both(one) if config.sync.exchange == "rounds" else ("-", "-")),
        *_both(run),
        str(len(merge_steps(config))),
        f"{needed.round_s:.3g}",
        f"{needed.utilisation:.1%}",
        f"{needed.gpu_hours:.3g}",
        ", ".join(fits) or "none",
    ]


def _status(study: Any, variant: Any, corpora: Any, results: Path) -> str:
    """What is stored of a trial, and so what the study would do with it."""
    from workbench.store import StudyFolder
    from workbench.trials import Corpus, identify

    prepared = corpora.get(Corpus.of(variant.config.data))
    if prepared is None:
        return "will run: its corpus has not been prepared"
    (trial,) = identify(study, [variant], lambda _: prepared.header.digest)
    stored = StudyFolder(results).stored(trial)
    if stored.status == "new":
        return "will run: no result of these settings and data"
    if stored.will_run:
        return f"will run: it was {stored.status}"
    return "done" if stored.status == "done" else f"{stored.status}: --retry-failed runs it again"


def _memory_table(parts: MemoryParts) -> tuple[Sequence[str], list[list[str]], Sequence[str]]:
    names = ("weights", "gradients", "moments", "activations", "sync_buffers")
    sizes = [getattr(parts, f"{name}_bytes") for name in names]
    cells = [f"{size / 1e9:.2f}" for size in (*sizes, parts.total_bytes)]
    cards = ["fits" if parts.total_bytes <= card * 1e9 else "too small" for card in CARDS_GB]
    columns = (*(name.replace("_", " ") for name in names), "total", *(f"{card} GB" for card in CARDS_GB))
    return columns, [[*cells, *cards]], columns


def _bytes_table(config: RunConfig, node: int) -> tuple[Sequence[str], list[list[str]], Sequence[str]]:
    rounds, merges = len(round_steps(config)), len(merge_steps(config))
    plain, merging = (round_bytes(config, node, merged) for merged in (False, True))
    kinds: list[tuple[str, int, WireBytes]] = [
        ("a round", rounds - merges, plain),
        ("a round with merge", merges, merging),
    ]
    shown = [[name, str(count), *_both(size)] for name, count, size in kinds if count]
    total = run_bytes(config, node)
    exchanges = config.total_steps if config.sync.exchange == "gradients" else rounds
    columns = ("", "times", "uplink", "downlink")
    return columns, [*shown, ["the whole run", str(exchanges), *_both(total)]], columns[1:]


def _both(size: WireBytes) -> list[str]:
    return [_gb(size.uplink_payload_bytes), _gb(size.downlink_payload_bytes)]


def _time_lines(config: RunConfig, machine: Machine, needed: Cost) -> list[str]:
    link = config.link
    what = "a step's gradients" if config.sync.exchange == "gradients" else "a round's bytes"
    up, down = ("any" if mbps is None else f"{mbps:g}" for mbps in (link.uplink_mbps, link.downlink_mbps))
    price = "" if needed.price is None else f", {needed.price:,.0f} at {machine.price_per_gpu_hour:g} an hour"
    return [
        f"steps         {config.total_steps:,} of {config.tokens_per_step:,} tokens, {needed.step_s:.3g} s each",
        f"exchange      {needed.round_s:.4g} s for {what} at {up} Mbit/s up, {down} down, {link.rtt_ms:g} ms",
        f"utilisation   {needed.utilisation:.1%}",
        f"wall time     {duration(needed.wall_h * 3600)} (h:min:s)",
        f"GPU-hours     {needed.gpu_hours:,.1f}{price}",
        _assumptions(machine),
    ]


def _assumptions(machine: Machine) -> str:
    return f"Devices reach {machine.device_tflops:g} TFLOP/s; only computing and moving bytes are counted."


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.4g}"


def _machine(options: argparse.Namespace) -> Machine:
    return Machine(device_tflops=options.device_tflops, price_per_gpu_hour=options.price)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workbench.plan",
        description="Predict parameters, memory, bytes, time and cost of a study's trials, or of one run of a preset.",
        allow_abbrev=False,
    )
    parser.add_argument("study", nargs="?", help="a study file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes, as for workbench.study")
    parser.add_argument("--model", help=f"a preset: {', '.join(group_options('model'))}")
    parser.add_argument("--method", default="spes", help="with --model (default: %(default)s)")
    parser.add_argument("--nodes", type=positive_int, default=4, help="with --model (default: %(default)s)")
    add_machine_arguments(parser)
    parser.add_argument("--price", type=positive, metavar="X", help="of one GPU-hour")
    parser.add_argument("--results", default="results", metavar="DIR", help="default: %(default)s")
    return parser


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """What a node is made of."""
    reached = "10^12 operations a second that a device reaches in training (default: %(default)g)"
    parser.add_argument("--device-tflops", type=positive, default=40.0, metavar="X", help=reached)
    for way in ("uplink", "downlink"):
        speed = f"{way} of a node, 10^6 bits a second, where a run states none (default: %(default)g)"
        parser.add_argument(f"--{way}-mbps", type=positive, default=1000.0, metavar="X", help=speed)
    parser.add_argument("--rtt-ms", type=float, default=20.0, metavar="X", help="round trip (default: %(default)g)")


def positive(text: str) -> float:
    """A number above 0, for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"({text}) must be above 0")
    return value


def positive_int(text: str) -> int:
    """A whole number above 0, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"({text}) must be at least 1")
    return value
