"""Speed and memory of one round, side by side in one run: a naive full-state protocol, and this one with each codec.

    python -m benchmarks.round [--quick] [--model-mb 1070] [--nodes 2 4 8 16] [--link 100]

Real processes, real gRPC on loopback: one server and its nodes for each row's group, all groups alive at once and
taking turns, one round without and one with a merge each, so that a busy machine slows all of them; where the groups do
not fit into memory together, one group after another, and the output says so. Nodes train nothing. Figures are medians
over turns, ratios medians of ratios within a turn. "Outside" is the share of a round that a node does not spend moving
bytes; "server peak" and node memory are resident bytes beyond the process itself, over the model's fp32 bytes; node
"kept" is what stays between rounds beside the model, "passing" what a round takes beyond that. Raw loopback is a TCP
socket in Python with 1 MiB sends, memcpy one thread into warm memory.

--nodes measures the server's memory for several numbers of nodes instead; --link the codecs on an emulated link.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.round_groups import Group, GroupRound, Protocol, base_bytes
from spes_core.config import (
    CheckpointConfig,
    DataConfig,
    LinkConfig,
    MergeConfig,
    ModelConfig,
    RunConfig,
    SyncConfig,
    WireConfig,
)
from spes_core.model.counting import parameter_counts
from spes_core.rules import check

CODECS = ("float32", "bfloat16", "int8", "int4")
BARS = {"float32": 5.0, "bfloat16": 9.0, "float32 + merge": 6.0}
LINK_BARS = {"int8": 0.27, "int4": 0.15}


@dataclass
class Row:
    """One line of the table: rounds of one group, with or without a merge; the latter is its group's second row."""

    label: str
    group: str
    rounds: list[GroupRound] = field(default_factory=list)


def model_of(megabytes: float) -> ModelConfig:
    """A model of about so many 10^6 bytes in fp32, of which each of 4 nodes trains 0.27; 252: d 256, hidden 1248."""
    scale = sqrt(megabytes / 252)
    width = max(16, round(256 * scale / 16) * 16)
    vocabulary = max(257, round(1024 * scale))
    shared = 2 * vocabulary * width + 4 * 4 * width * width
    hidden = max(8, round((megabytes * 1e6 / 4 - shared) / (4 * 16 * 3 * width) / 8) * 8)
    return ModelConfig(
        num_layers=4, d_model=width, num_heads=4, num_kv_heads=4, num_experts=16, top_k=2, expert_hidden=hidden,
        vocab_size=vocabulary,
    )  # fmt: skip


def config_of(model: ModelConfig, nodes: int, dtype: str, link: LinkConfig | None = None) -> RunConfig:
    """A run of many rounds, every second of which merges; none on a ``link``."""
    data = DataConfig(tokenizer_vocab_size=257, sequence_length=16, global_batch_sequences=nodes)
    config = RunConfig(
        nodes=nodes,
        model=model,
        data=data,
        budget_tokens=1000 * nodes * 16,
        sync=SyncConfig(interval_steps=1),
        merge=MergeConfig(enabled=link is None, interval_steps=2, until_step=10**6, num_neighbours=4),
        wire=WireConfig(dtype=dtype),  # type: ignore[arg-type]
        link=link or LinkConfig(),
        checkpoint=CheckpointConfig(interval_rounds=0),
    )
    assert not (problems := check(config)), problems
    return config


def take_turns(rows: Sequence[Row], configs: dict[str, RunConfig], turns: int, together: bool) -> list[list[float]]:
    """Fill the rows' rounds; raw speeds (loopback, memcpy) in GB/s, measured between the turns.

    A turn of a group is a round for each of its rows: without a merge, and where the run merges, then with one. The
    first turn is for warming up and not kept.
    """
    raw: list[list[float]] = []
    for batch in [list(configs)] if together else [[name] for name in configs]:
        with ExitStack() as stack:
            groups = {}
            for name in batch:
                protocol: Protocol = "naive" if name == "naive" else "ours"
                groups[name] = Group(protocol, configs[name])
                stack.callback(groups[name].close)
            for turn in range(1 + turns):
                if turn:
                    raw.append([loopback_gb_per_s(), memcpy_gb_per_s()])
                for name, group in groups.items():
                    own = [row for row in rows if row.group == name]
                    for place, row in enumerate(own):
                        measured = group.run_round(turn * len(own) + place)
                        if turn:
                            row.rounds.append(measured)
    return raw


def loopback_gb_per_s(num_bytes: int = 1 << 29) -> float:
    """Bytes through a TCP socket on this machine, into one warm buffer, by a thread at each end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    message, buffer = bytes(1 << 20), memoryview(bytearray(1 << 20))

    def send() -> None:
        for _ in range(num_bytes >> 20):
            sender.sendall(message)

    thread = threading.Thread(target=send)
    began_s = time.perf_counter()
    thread.start()
    left = num_bytes
    while left:
        left -= receiver.recv_into(buffer)
    elapsed_s = time.perf_counter() - began_s
    thread.join()
    sender.close()
    receiver.close()
    return num_bytes / elapsed_s / 1e9


def memcpy_gb_per_s(num_bytes: int = 1 << 28) -> float:
    """Bytes copied into memory that has been written before."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    began_s = time.perf_counter()
    target[:] = source
    return num_bytes / (time.perf_counter() - began_s) / 1e9


@dataclass(frozen=True, kw_only=True)
class Line:
    """The figures of one row."""

    row: str
    wall_s: float
    ratio: float | None
    """How many times faster than the naive row with or without a merge."""
    server_cpu_s: float
    nodes_cpu_s: float
    server_peak: float
    node_kept: float
    node_passing: float
    outside: float
    moved_gb: float
    gb_per_s: float
    parts_s: dict[str, float]
    """Mean over nodes of the seconds that a round's report names."""


def summarise(row: Row, baseline: Row | None, model_bytes: int, server_base: int) -> Line:
    """The medians of a row."""
    rounds, nodes = row.rounds, [node for measured in row.rounds for node in measured.nodes]
    parts = [name for name in nodes[0].report if name.endswith("_s")]
    return Line(
        row=row.label,
        wall_s=median(measured.wall_s for measured in rounds),
        ratio=None if baseline is None else median(
            naive.wall_s / ours.wall_s for naive, ours in zip(baseline.rounds, rounds, strict=True)
        ),
        server_cpu_s=median(measured.server_cpu_s for measured in rounds),
        nodes_cpu_s=median(sum(node.cpu_s for node in measured.nodes) for measured in rounds),
        server_peak=(max(measured.server_peak_bytes for measured in rounds) - server_base) / model_bytes,
        node_kept=max(node.idle_bytes - node.base_bytes for node in nodes) / model_bytes,
        node_passing=max(node.peak_bytes - node.idle_bytes for node in nodes) / model_bytes,
        outside=median(measured.outside_share for measured in rounds),
        moved_gb=median(measured.moved_bytes for measured in rounds) / 1e9,
        gb_per_s=median(measured.moved_bytes / measured.wall_s for measured in rounds) / 1e9,
        parts_s={name: median(node.report[name] for node in nodes) for name in parts},
    )  # fmt: skip


def print_lines(lines: Sequence[Line]) -> None:
    """The table, and under it where the time of each row went."""
    heads = (
        f"{'wall s':>8}{'× naive':>9}{'CPU server':>12}{'CPU nodes':>11}{'server peak':>13}{'node kept':>11}"
        f"{'passing':>9}{'outside':>9}{'GB moved':>10}{'GB/s':>7}"
    )
    print(f"\n{'row':20}{heads}")
    for line in lines:
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        print(
            f"{line.row:20}{line.wall_s:8.2f}{ratio:>9}{line.server_cpu_s:12.2f}{line.nodes_cpu_s:11.2f}"
            f"{line.server_peak:12.2f}×{line.node_kept:10.2f}×{line.node_passing:8.2f}×{line.outside:9.0%}"
            f"{line.moved_gb:10.3f}{line.gb_per_s:7.2f}"
        )
    print("\nseconds of a node's round, medians over nodes and turns")
    for line in lines:
        print(f"{line.row:20}" + "  ".join(f"{name[:-2]} {value:.3f}" for name, value in line.parts_s.items()))


def print_bars(lines: Sequence[Line]) -> None:
    """What the project set itself to reach, and whether this run did."""
    by_row = {line.row: line for line in lines}
    for label, bar in BARS.items():
        if (line := by_row.get(label)) and line.ratio is not None:
            print(f"{label}: {line.ratio:.2f} × faster than naive, bar {bar:g}: {_verdict(line.ratio >= bar)}")
    ours = [line for line in lines if not line.row.startswith("naive")]
    for what, bar, worst in (
        ("server peak", 1.7, max(line.server_peak for line in ours)),
        ("node memory", 0.35, max(line.node_kept + line.node_passing for line in ours)),
    ):
        print(f"{what}: {worst:.2f} × the model at most, bar {bar:g}: {_verdict(worst <= bar)}")


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def compare(model: ModelConfig, nodes: int, turns: int, codecs: Sequence[str]) -> list[Line]:
    """The main table."""
    rows = [Row(f"{name}{merge}", name) for name in ("naive", *codecs) for merge in ("", " + merge")]
    configs = {"naive": config_of(model, nodes, "float32")} | {c: config_of(model, nodes, c) for c in codecs}
    model_bytes = 4 * parameter_counts(model, ()).total
    together = _need_bytes(model_bytes, nodes, codecs) < 0.8 * available_bytes()
    if not together:
        print("the groups do not fit into memory together: one after another, so compare with care")
    raw = take_turns(rows, configs, turns, together)
    loopback, memcpy = (median(speeds) for speeds in zip(*raw, strict=True))
    bases = {name: base_bytes("naive" if name == "naive" else "ours") for name in ("naive", "ours")}
    lines = []
    for row in rows:
        kind = "naive" if row.group == "naive" else "ours"
        lines.append(summarise(row, rows[row.label.endswith("merge")], model_bytes, bases[kind]))
    print_lines(lines)
    print(f"\nraw loopback {loopback:.2f} GB/s, memcpy {memcpy:.2f} GB/s", end="; ")
    print(f"float32 moves {lines[2].gb_per_s / loopback:.0%} of raw loopback")
    print_bars(lines)
    return lines


def compare_nodes(model: ModelConfig, counts: Sequence[int], turns: int, codec: str) -> list[Line]:
    """The server's memory against the number of nodes."""
    model_bytes, server_base, lines = 4 * parameter_counts(model, ()).total, base_bytes("ours"), []
    for nodes in counts:
        rows = [Row(f"{nodes} nodes", codec), Row(f"{nodes} nodes + merge", codec)]
        take_turns(rows, {codec: config_of(model, nodes, codec)}, turns, together=True)
        lines += [summarise(row, None, model_bytes, server_base) for row in rows]
    print_lines(lines)
    peaks = [line.server_peak for line in lines]
    middle = (max(peaks) + min(peaks)) / 2
    print(
        f"server peak {min(peaks):.2f} to {max(peaks):.2f} × the model, bars 1.7 and ± 10 %:"
        f" {_verdict(max(peaks) <= 1.7 and max(peaks) <= 1.1 * middle)}"
    )
    return lines


def compare_link(model: ModelConfig, nodes: int, turns: int, mbps: float) -> list[Line]:
    """fp32, int8 and int4 on an emulated link."""
    link = LinkConfig(uplink_mbps=mbps, downlink_mbps=mbps, emulate=True)
    codecs = ("float32", "int8", "int4")
    rows = [Row(codec, codec) for codec in codecs]
    take_turns(rows, {codec: config_of(model, nodes, codec, link) for codec in codecs}, turns, together=True)
    model_bytes, server_base = 4 * parameter_counts(model, ()).total, base_bytes("ours")
    lines = [summarise(row, None, model_bytes, server_base) for row in rows]
    print_lines(lines)
    for row in rows[1:]:
        share = median(a.wall_s / b.wall_s for a, b in zip(row.rounds, rows[0].rounds, strict=True))
        bar = LINK_BARS[row.label]
        print(f"{row.label} at {mbps:g} Mbit/s: {share:.3f} of fp32's time, bar {bar:g}: {_verdict(share <= bar)}")
    return lines


def available_bytes() -> int:
    """Memory that is free or can be freed."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def _need_bytes(model_bytes: int, nodes: int, codecs: Sequence[str]) -> float:
    """What all groups may hold at once, roughly: models, residuals, the naive server, 0.25 GB a process."""
    processes = (1 + len(codecs)) * (nodes + 1) * 0.25e9
    return processes + model_bytes * (nodes * (1.3 + 1.4 * len(codecs)) + 15 + 1.7 * len(codecs))


def main(argv: list[str] | None = None) -> int:
    """Run what is asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model-mb", type=float, default=None, help="fp32 bytes of the model, 10^6; default 252")
    parser.add_argument("--nodes", type=int, nargs="+", default=None, help="server memory for these numbers of nodes")
    parser.add_argument("--link", type=float, default=None, metavar="MBPS", help="codecs on an emulated link")
    parser.add_argument("--turns", type=int, default=None, help="default 5; with --quick 2")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=CODECS)
    parser.add_argument("--quick", action="store_true", help="a model of 40 MB, 2 turns")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file too")
    arguments = parser.parse_args(argv)
    began_s = time.perf_counter()
    model = model_of(arguments.model_mb or (40 if arguments.quick else 252))
    turns = arguments.turns or (2 if arguments.quick else 5)
    counts = parameter_counts(model, range(4))
    print(
        f"model: {4 * counts.total / 1e6:.0f} MB in fp32, 4 layers, d {model.d_model}, 16 experts of hidden size"
        f" {model.expert_hidden}, vocabulary {model.vocab_size}; one of 4 nodes trains"
        f" {counts.trained / counts.total:.2f}; {turns} turns, load average {os.getloadavg()[0]:.1f}"
    )
    if arguments.link is not None:
        lines = compare_link(model, 4, turns, arguments.link)
    elif arguments.nodes is not None and len(arguments.nodes) > 1:
        lines = compare_nodes(model, arguments.nodes, turns, arguments.codecs[0])
    else:
        lines = compare(model, arguments.nodes[0] if arguments.nodes else 4, turns, arguments.codecs)
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(line) for line in lines], indent=1) + "\n", encoding="utf-8")
    print(f"\n{time.perf_counter() - began_s:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
