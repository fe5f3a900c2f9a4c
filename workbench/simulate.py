"""`python -m workbench.simulate --model 7b --nodes 4 16 64 256 1024`: a run taken to thousands of nodes.

One line for each number of nodes, and the number at which the server's link becomes the bottleneck. The model is in
`workbench.fleet`; every node keeps its share of the batch, so more nodes take larger batches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from spes_core.config import RunConfig
from spes_core.errors import ConfigError
from workbench.errors import StudyError
from workbench.fleet import LARGEST_FLEET, Fleet, Outcome, server_limited_from, simulate
from workbench.groups import group_options
from workbench.plancommand import add_machine_arguments, positive, positive_int, preset_run
from workbench.terminal import print_table

_COLUMNS = (
    *("nodes", "round s", "computing", "slow or failed", "node links", "server link", "utilisation", "present"),
    *("tokens/s", "most of it"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns 0, or 2 when the input is wrong."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        fleets = [_fleet(options, nodes) for nodes in options.fleet]
        options.nodes = 1
        config = preset_run(options, options.overrides)
        if config.sync.exchange != "rounds":
            raise StudyError([f"--method ({options.method}) has no rounds to simulate; name spes, dilico or diloco"])
        show(config, fleets)
    except StudyError as error:
        for mistake in error.mistakes:
            print(f"error: {mistake}", file=sys.stderr)
        return 2
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


def show(config: RunConfig, fleets: Sequence[Fleet]) -> None:
    """Print what each fleet would reach, and where the server's link begins to limit."""
    one = fleets[0]
    servers = f"a tree of servers with {one.fan_out} children" if one.fan_out else f"{one.shards} server(s)"
    speed = "no limit" if one.server_mbps is None else f"{one.server_mbps:g} Mbit/s each way"
    print_table(
        f"{config.method} by rounds of {config.sync.interval_steps} steps over {servers}, link of a server: {speed}",
        _COLUMNS,
        [_row(simulate(config, fleet)) for fleet in fleets],
        _COLUMNS[:-1],
    )
    found = server_limited_from(config, one)
    if one.server_mbps is not None and found is None:
        print(f"\nUp to {LARGEST_FLEET:,} nodes the servers' links are no slower than those of equal nodes.")
    elif found is not None:
        print(f"\nFrom {found:,} nodes on the servers' links are the bottleneck of a transfer between equal nodes.")


def _row(outcome: Outcome) -> list[str]:
    seconds = (outcome.round_s, outcome.compute_s, outcome.waiting_s, outcome.links_s, outcome.server_s)
    shares = (outcome.utilisation, outcome.present)
    times, parts = (f"{value:,.1f}" for value in seconds), (f"{value:.1%}" for value in shares)
    return [f"{outcome.nodes:,}", *times, *parts, f"{outcome.tokens_per_s:,.0f}", outcome.limit]


def _fleet(options: argparse.Namespace, nodes: int) -> Fleet:
    if options.fan_out is not None and (options.fan_out < 2 or options.shards > 1):
        raise StudyError([f"--fan-out ({options.fan_out}) must be at least 2, and excludes --shards"])
    negative = [name for name in ("speed_spread", "link_spread", "failures", "repair_s") if getattr(options, name) < 0]
    if negative:
        raise StudyError([f"--{name.replace('_', '-')} must not be negative" for name in negative])
    fleet = Fleet(nodes=nodes, device_tflops=options.device_tflops, shards=options.shards, fan_out=options.fan_out)
    return replace(
        fleet,
        server_mbps=options.server_mbps,
        speed_spread=options.speed_spread,
        link_spread=options.link_spread,
        failures_per_node_hour=options.failures,
        repair_s=options.repair_s,
        rounds=options.rounds,
        seed=options.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workbench.simulate",
        description="Simulate rounds of a preset on fleets of many nodes, by arithmetic and seeded draws.",
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the run: round.quorum=0.9")
    parser.add_argument("--model", required=True, help=f"a preset: {', '.join(group_options('model'))}")
    parser.add_argument("--method", default="spes", help="default: %(default)s")
    parser.add_argument("--nodes", dest="fleet", type=positive_int, nargs="+", required=True, help="sizes of the fleet")
    add_machine_arguments(parser)
    parser.add_argument("--server-mbps", type=positive, metavar="X", help="link of each server (default: no limit)")
    parser.add_argument("--shards", type=positive_int, default=1, help="servers that share the tensors")
    parser.add_argument("--fan-out", type=int, help="children of each server in a tree")
    for name, what in (("speed", "computing speed"), ("link", "links")):
        spread = f"standard deviation of the logarithm of the nodes' {what} (default: all equal)"
        parser.add_argument(f"--{name}-spread", type=float, default=0.0, metavar="X", help=spread)
    parser.add_argument("--failures", type=float, default=0.0, metavar="X", help="failures of a node in an hour")
    parser.add_argument("--repair-s", type=float, default=600.0, metavar="X", help="default: %(default)g")
    parser.add_argument("--rounds", type=positive_int, default=20, help="rounds simulated (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    return parser


if __name__ == "__main__":
    sys.exit(main())
