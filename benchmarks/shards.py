"""Round time over the number of servers that share the tensors, beside the simulator: `python -m benchmarks.shards`.

    sudo python -m benchmarks.shards [--mbps 50] [--nodes 4] [--turns 5] [--shards 1 2 4]

Each server is a process on a host of its own (a network namespace) whose link the kernel limits, both ways, to so many
10^6 bits a second; nodes are processes outside, on links without limit, and train nothing. The groups of all rows are
alive at the same time and take turns. The simulator (`workbench.fleet`) is told the links and nothing else: not
encoding, not the mean, not that servers get unequal parts. Ratios are medians of ratios within a turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from statistics import median

from spes_core.config import DataConfig, MergeConfig, ModelConfig, RunConfig, ServerConfig, SyncConfig
from spes_core.model.counting import tensor_shapes, tensors_by_shard
from spes_core.rules import check
from workbench.fleet import Fleet, payloads, simulate
from workbench.terminal import print_table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the testbed lies beside the tests

from benchmarks.shard_groups import Group
from tests.multihost.testbed import reason_not_possible, testbed

MODEL = ModelConfig(
    num_layers=8,
    d_model=128,
    num_heads=4,
    num_kv_heads=4,
    num_experts=16,
    top_k=2,
    expert_hidden=64,
    vocab_size=512,
)
FIRST_PORT = 29400
COLUMNS = (
    "servers",
    "largest part",
    "round s",
    "times 1 server",
    "simulated s",
    "simulated times",
    "measured / simulated",
)


def run_config(nodes: int, shards: int, turns: int) -> RunConfig:
    """Rounds of one step, without merges: the simulator has none."""
    data = DataConfig(tokenizer_vocab_size=300, sequence_length=4, global_batch_sequences=nodes)
    config = RunConfig(
        nodes=nodes,
        model=MODEL,
        data=data,
        budget_tokens=turns * 4 * nodes,
        sync=SyncConfig(interval_steps=1),
        merge=MergeConfig(enabled=False),
        server=ServerConfig(shards=shards),
    )
    config = replace(config, checkpoint=replace(config.checkpoint, interval_rounds=0))
    assert not check(config), check(config)
    return config


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0, or 2 where no hosts can be made."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shards", description=__doc__.partition(":")[0])
    parser.add_argument("--mbps", type=float, default=50.0, help="link of each server (default: %(default)g)")
    parser.add_argument("--nodes", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=5, help="rounds of each row (default: %(default)s)")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4], help="numbers of servers")
    options = parser.parse_args(arguments)
    if reason := reason_not_possible():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    configs = [run_config(options.nodes, shards, options.turns + 1) for shards in options.shards]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spes-bed-")))
        bed = stack.enter_context(testbed(max(options.shards), folder / "bed"))
        for host in bed.hosts:
            bed.shape(host, options.mbps)
        groups = [stack.enter_context(Group(bed, c, FIRST_PORT + i)) for i, c in enumerate(configs)]
        turns = [[group.run_round(turn) for group in groups] for turn in range(options.turns + 1)]
    assert all(len({digest for _, digest in turn}) == 1 for turn in turns), "the number of servers changed a bit"
    show(configs, options.mbps, [[seconds for seconds, _ in turn] for turn in turns[1:]])
    return 0


def show(configs: Sequence[RunConfig], mbps: float, turns: Sequence[Sequence[float]]) -> None:
    """One row for each number of servers; ``turns`` are seconds by turn and row."""
    one = configs[0]
    fleets = [Fleet(nodes=one.nodes, server_mbps=mbps, shards=config.server.shards, rounds=1) for config in configs]
    simulated = [outcome.links_s + outcome.server_s for outcome in (simulate(one, fleet) for fleet in fleets)]
    rows = []
    for index, config in enumerate(configs):
        seconds, ratio = median(turn[index] for turn in turns), median(turn[0] / turn[index] for turn in turns)
        largest = max(sum(prod(tensor_shapes(MODEL)[n]) for n in names) for names in tensors_by_shard(config))
        whole = sum(map(prod, tensor_shapes(MODEL).values()))
        rows.append(
            [
                str(config.server.shards),
                f"{largest / whole:.1%}",
                f"{seconds:.2f}",
                f"{ratio:.2f}",
                f"{simulated[index]:.2f}",
            ]
            + [f"{simulated[0] / simulated[index]:.2f}", f"{seconds / simulated[index]:.2f}"]
        )
    sizes = payloads(one, one.nodes)
    title = f"{one.nodes} nodes, {mbps:g} Mbit/s for each server, {sizes.up.sum() / 1e6:.1f} MB up and"
    print_table(
        f"{title} {sizes.down.sum() / 1e6:.1f} MB down a round, medians of {len(turns)} turns", COLUMNS, rows, COLUMNS
    )


if __name__ == "__main__":
    sys.exit(main())
