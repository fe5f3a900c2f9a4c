"""Rounds of real processes on emulated links beside what the simulator says of them: `python -m benchmarks.simulator`.

Every case is a run of one server and N nodes that slow their own connections down. The simulator is told the step time
that the slowest node measured, and nothing else. What it leaves out is the difference: encoding, the mean, and that
nodes which share a processor are not ready at the same moment. Compare rows of one table only.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from spes_core.config import RunConfig, from_dict
from workbench.corpora import prepare_corpus
from workbench.costs import slowest_step_s
from workbench.execute import ExecutionSettings, run_trial
from workbench.fleet import Fleet, Outcome, simulate
from workbench.groups import CONF
from workbench.launch.launcher import Launcher
from workbench.launch.local import open_launcher
from workbench.recording import Recording, of_kind
from workbench.terminal import print_table
from workbench.trees import Tree, merge
from workbench.trials import Corpus, Trial
from workbench.yamlsource import read_yaml

SEQUENCES_A_NODE, SEQUENCE_LENGTH = 2, 64
COLUMNS = (
    *("nodes", "Mbit/s up", "down", "H", "method", "codec", "computing s"),
    *("simulated s", "measured s", "measured / simulated", "encoding + mean s", "rounds"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: what its rounds depend on."""

    nodes: int = 2
    uplink_mbps: float = 20
    downlink_mbps: float = 40
    interval_steps: int = 5
    method: str = "spes"
    codec: str = "float32"
    rounds: int = 5

    def config(self, data: Tree) -> RunConfig:
        """A run of the tiny model, without merges: the simulator has none."""
        return from_dict(
            merge(
                read_yaml(CONF / "method" / f"{self.method}.yaml").data,
                {
                    "nodes": self.nodes,
                    "model": read_yaml(CONF / "model" / "tiny.yaml").data,
                    "data": {
                        "sequence_length": SEQUENCE_LENGTH,
                        "global_batch_sequences": SEQUENCES_A_NODE * self.nodes,
                        **data,
                    },
                    "budget_tokens": self._steps * SEQUENCES_A_NODE * self.nodes * SEQUENCE_LENGTH,
                    "sync": {"interval_steps": self.interval_steps},
                    "merge": {"enabled": False},
                    "wire": {"dtype": self.codec},
                    "link": {
                        "uplink_mbps": self.uplink_mbps,
                        "downlink_mbps": self.downlink_mbps,
                        "rtt_ms": 20,
                        "emulate": True,
                    },
                    "log": {"interval_steps": self.interval_steps},
                    "validation": {"interval_tokens": 10**9, "max_sequences": self.nodes},
                },
            )
        )

    @property
    def _steps(self) -> int:
        return self.interval_steps * self.rounds


CASES = (
    Case(),
    Case(nodes=4),
    Case(nodes=8, rounds=3),
    Case(uplink_mbps=5),
    Case(uplink_mbps=80, downlink_mbps=80),
    Case(uplink_mbps=40, downlink_mbps=10),
    Case(interval_steps=40),
    Case(method="dilico"),
    Case(method="diloco", nodes=3, codec="bfloat16"),
    Case(codec="int8", uplink_mbps=5),
    Case(codec="int4", uplink_mbps=5, nodes=4),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Rounds of a real run, without the first, which ends with what starting leaves over."""

    round_s: float
    """Median from the end of a round to the end of the next."""
    step_s: float
    """Median step of the slowest node, while it shares the processor with the others."""
    unsimulated_s: float
    """Encoding, decoding, waiting for the mean: what a node reports of a round beside the moving of bytes."""


def measure(config: RunConfig, trial_dir: Path, data_dir: Path, launcher: Launcher) -> Measured:
    """Run it. Raises RuntimeError with the run's own words when it fails."""
    trial = Trial(
        id="0" * 16, name="run", study="benchmark", arm="run", role="treatment", axes={}, seed=0, config=config
    )
    result = run_trial(trial, trial_dir, ExecutionSettings(data_dir=data_dir, device="cpu"), launcher)
    if result["status"] != "done":
        raise RuntimeError(f"the run has status {result['status']}: {result['error']}")
    recording = Recording(trial_dir / "events")
    ends_s = [event["time_s"] for event in recording.server_rounds()]
    steps_s = [
        median([event["step_time_s"] for event in of_kind(events, "train")][1:]) for events in recording.nodes.values()
    ]
    rounds = [event for node in recording.nodes for event in recording.rounds_of_node(node)[1:]]
    return Measured(
        round_s=median(later - earlier for earlier, later in pairwise(ends_s)),
        step_s=max(steps_s),
        unsimulated_s=median(event["serialise_s"] + event["aggregate_s"] for event in rounds),
    )


def simulated(config: RunConfig, step_s: float) -> Outcome:
    """The same rounds, simulated on nodes that take so long for a step."""
    return simulate(config, Fleet(nodes=config.nodes, device_tflops=slowest_step_s(config, 1.0) / step_s, rounds=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many (default: all)")
    parser.add_argument("--corpus", default="stdlib", help="default: %(default)s")
    options = parser.parse_args(arguments)
    data = {"corpus": options.corpus, "tokenizer_vocab_size": 512}
    rows = []
    with tempfile.TemporaryDirectory() as folder, open_launcher() as launcher:
        for number, case in enumerate(CASES[: options.cases]):
            config = case.config(data)
            found = measure(config, Path(folder, str(number)), prepare_corpus(Corpus.of(config.data)).folder, launcher)
            rows.append(_row(case, found, simulated(config, found.step_s)))
    load = os.getloadavg()[0]
    print_table(f"rounds of real processes; {os.cpu_count()} CPUs, load average {load:.1f}", COLUMNS, rows, COLUMNS)
    return 0


def _row(case: Case, found: Measured, outcome: Outcome) -> list[str]:
    link = (f"{case.uplink_mbps:g}", f"{case.downlink_mbps:g}")
    times = (outcome.compute_s, outcome.round_s, found.round_s, found.round_s / outcome.round_s, found.unsimulated_s)
    cells = (str(case.nodes), *link, str(case.interval_steps), case.method, case.codec)
    return [*cells, *(f"{time_s:.3f}" for time_s in times), str(case.rounds)]


if __name__ == "__main__":
    sys.exit(main())
