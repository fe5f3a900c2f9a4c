"""Every mistake of a study file is told in one list: mending one of them never brings up another."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.errors import StudyError
from workbench.spec import read_study
from workbench.trials import expand

SOUND = """\
schema: 1
name: probe
question: What happens?
defaults: [model/tiny, data/default, launcher/local]
run:
  nodes: 4
  budget_tokens: 102_400
  optim: {lr: 1e-3, beta1: 0.9}
  model: {num_heads: 4, d_model: 128}
  wire: {dtype: float32}
  data: {sequence_length: 128}
arms:
  reference: {method: centralized, role: reference}
  first: {method: dilico, role: baseline}
  second: {method: dilico, role: baseline, optim.lr: 2e-3, sweep: {grid: {outer.lr: [1]}}}
  spes: {method: spes, model: {}}
sweep:
  grid: {sync.interval_steps: [5, 10], merge.num_neighbours: [2, 3]}
  zip: {merge.alpha: [0.1, 0.2], merge.interval_steps: [10, 20]}
  exclude: [{sync.interval_steps: 5, merge.num_neighbours: 3}]
seeds: [0, 1]
equal: [model.num_layers, model.num_experts, data, budget_tokens]
resources: {timeout: 2h, retries: 0}
metrics: {primary: {name: eval/loss}}
report: {x: sync.interval_steps, formats: [html]}
hardware: {memory_gb: 24}
launcher: {threads: 1}
"""

MISTAKES = {
    "unknown config of a group": ("launcher/local", "launcher/locl", "defaults[2] (launcher/locl) names no config"),
    "unknown key": ("hardware:", "hardwear:", 'hardwear is not a setting; did you mean "hardware"?'),
    "setting outside run": ("seeds: [0, 1]", "seeds: [0, 1]\nfrozen.dtype: float32", "write it as run.frozen"),
    "unknown setting of run": (
        "beta1: 0.9",
        "beta1: 0.9, epss: 1",
        'run.optim.epss is not a setting; did you mean "eps"?',
    ),
    "wrong type": (
        "  nodes: 4",
        "  nodes: 4\n  log.interval_steps: soon",
        "run.log.interval_steps ('soon') must be a whole",
    ),
    "unknown choice": ("dtype: float32", "dtype: floot32", "run.wire.dtype ('floot32') must be one of"),
    "given twice": ("seeds:", "report: {}\nseeds:", "report is given twice"),
    "out of range": ("beta1: 0.9", "beta1: 1.9", "run.optim.beta1 (1.9) must be at least 0 and below 1"),
    "two settings": ("d_model: 128", "d_model: 132", "run.model.head_dim (33) must be even"),
    "seed in an arm": (
        "role: reference}",
        "role: reference, seed: 3}",
        "arms.reference.seed (3) must be given to all arms",
    ),
    "two references": ("{method: dilico, role: baseline}", "{method: dilico, role: reference}", "must be one arm's"),
    "setting of an arm": (
        "optim.lr: 2e-3",
        "optim.lrr: 2e-3, merge.alpha: 3",
        "arms.second.optim.lrr is not a setting",
    ),
    "range in an arm": ("optim.lr: 2e-3", "optim.lr: -2e-3", "arms.second.optim.lr (-0.002) must be above 0"),
    "value of an axis": ("[5, 10]", "[5, 10, 0]", "sweep.grid.sync.interval_steps (0) must be at least 1"),
    "type on an axis": ("[1]", "[1, x]", "arms.second.sweep.grid.outer.lr ('x') must be a number"),
    "point of two axes": (
        "[2, 3]",
        "[2, 3, 16]",
        "sweep.grid.merge.num_neighbours (16) must be below model.num_experts",
    ),
    "unknown axis": (
        "zip: {",
        "zip: {merge.alfa: [1], ",
        'sweep.zip.merge.alfa is not a setting; did you mean "alpha"?',
    ),
    "zip of unequal length": ("[0.1, 0.2]", "[0.1, 0.2, 0.3]", "sweep.zip must have as many values on each axis"),
    "idle exclusion": (
        "exclude: [",
        "exclude: [{optim.lr: 1}, ",
        "sweep.exclude[0] (optim.lr) is no axis of this sweep",
    ),
    "equal to nothing": (
        "equal: [",
        "equal: [modl, ",
        'equal[0] (modl) is not a setting of a run; did you mean "model"?',
    ),
    "equality gate": ("model: {}", "model: {num_layers: 3}", "arms.spes.model.num_layers must be equal in all arms"),
    "repeated seed": ("[0, 1]", "[0, 1, 1]", "seeds ([0, 1, 1]) must differ"),
    "duration": ("timeout: 2h", "timeout: soon", "resources.timeout (soon) must be a duration"),
    "number of retries": ("retries: 0", "retries: -1", "resources.retries (-1) must not be negative"),
    "metric": (
        "name: eval/loss",
        "name: eval/los",
        'metrics.primary.name (eval/los) is not a metric; did you mean "eval/loss"?',
    ),
    "no axis": ("x: sync.interval_steps", "x: outer.momentum", "report.x (outer.momentum) is no axis of any arm"),
    "format": ("[html]", "[html, docx]", "report.formats[1] ('docx') must be one of"),
    "launcher": ("threads: 1", "threads: 0", "launcher.threads (0) must be at least 1"),
}
TOGETHER = [name for name in MISTAKES if name not in ("setting of an arm", "given twice", "unknown key")]
"""One of each kind that can stand in one file."""

SEARCH = SOUND.replace("  spes: {method: spes, model: {}}", "  spes: {method: spes}").replace(
    "seeds: [0, 1]",
    """\
search:
  n_trials: 4
  arm: spes
  space:
    optim.lr: {low: 1e-3, high: 1e-2, log: true}
    optim.beta1: {low: 0.8, high: 0.9}
    merge: {alpha: [0.1, 0.2], interval_steps: [5, 10]}
  objective: comm/uplink_gb
  constraints: [{metric: eval/loss, tolerance: 0.1}, {metric: eval/perplexity, at_most: 9}]
  confirm: {top: 1, seeds: [7]}
seeds: [0, 1]""",
)
SEARCH = SEARCH.replace("x: sync.interval_steps", "x: merge.alpha")
SEARCH = SEARCH[: SEARCH.index("sweep:\n")] + SEARCH[SEARCH.index("search:\n") :]
IN_A_SEARCH = {
    "points": ("n_trials: 4", "n_trials: 0", "search.n_trials (0) must be at least 1"),
    "arm": (
        "role: reference}",
        "role: reference, parallel.strategy: fspd}",
        "arms.reference.parallel.strategy ('fspd')",
    ),
    "values": ("alpha: [0.1, 0.2]", "alpha: [0.1, 3]", "search.space.merge.alpha (3) must be between 0 and 1"),
    "range": ("low: 0.8", "low: 0.95", "search.space.optim.beta1.low (0.95) must be below high (0.9)"),
    "word of a range": (
        "log: true",
        "log: true, lgo: 3",
        "search.space.optim.lr.lgo is not a setting",
    ),
    "path": ("[5, 10]}", "[5, 10], until_stp: [1]}", "search.space.merge.until_stp is not a setting"),
    "objective": ("uplink_gb\n", "uplink_g\n", "search.objective.metric (comm/uplink_g) is not a metric"),
    "limit": ("tolerance: 0.1}", "tolerance: -0.1}", "search.constraints[0].tolerance (-0.1) must not be negative"),
    "key of a constraint": ("at_most: 9", "at_moost: 9", "search.constraints[1].at_moost is not a setting"),
    "confirming": ("seeds: [7]", "seeds: [1]", "search.confirm.seeds (1) must be fresh"),
    "gate": ("spes}", "spes, data.sequence_length: 64}", "arms.spes.data.sequence_length must be equal in all arms"),
    "rule of runs": ("nodes: 4", "nodes: 3", "must be a multiple of nodes"),
}


def listed(folder: Path, text: str) -> tuple[str, ...]:
    path = folder / "probe.yaml"
    path.write_text(text)
    try:
        expand(read_study(path))
    except StudyError as error:
        return tuple(mistake.replace(str(path), "FILE") for mistake in error.mistakes)
    return ()


def with_mistakes(text: str, changes: dict[str, tuple[str, str, str]], names: list[str]) -> str:
    for name in names:
        old, new, _ = changes[name]
        assert old in text, name
        text = text.replace(old, new, 1)
    return text


def of(mistakes: tuple[str, ...], words: str) -> list[str]:
    return [mistake for mistake in mistakes if words in mistake]


def test_the_studies_without_mistakes_have_none(tmp_path: Path) -> None:
    assert listed(tmp_path, SOUND) == ()
    assert listed(tmp_path, SEARCH) == ()


@pytest.mark.parametrize("name", MISTAKES)
def test_one_mistake_gives_one_line_with_its_place(tmp_path: Path, name: str) -> None:
    old, new, words = MISTAKES[name]
    text = SOUND.replace(old, new, 1)
    found = listed(tmp_path, text)
    assert len(of(found, words)) == 1 and len(found) <= 1 + (name == "setting of an arm"), found
    assert found[0].startswith("FILE:")


@pytest.mark.parametrize(("text", "changes"), [(SOUND, MISTAKES), (SEARCH, IN_A_SEARCH)])
def test_a_file_with_every_kind_of_mistake_gets_one_list_of_them(
    tmp_path: Path, text: str, changes: dict[str, tuple[str, str, str]]
) -> None:
    names = [name for name in changes if changes is not MISTAKES or name in TOGETHER]
    found = listed(tmp_path, with_mistakes(text, changes, names))
    for name in names:
        assert len(of(found, changes[name][2])) == 1, (name, found)
    assert len(found) == len(names), found
    assert all(line.startswith("FILE:") for line in found)


@pytest.mark.parametrize(
    ("text", "old", "new", "words"),
    [
        (SOUND, "run:\n", "rnu:\n", 'rnu is not a setting; did you mean "run"?'),
        (SOUND, "spes: {method: spes, model: {}}", "spes: {method: spess, model: {num_layers: 3}}", "names no config"),
        (SOUND, "method: spes, model: {}}", "method: spes, model: {}, nodse: 3}", 'did you mean "nodes"?'),
        (SOUND, "model/tiny", "model/7bb", "names no config of the group model"),
        (SOUND, "equal: [", "equall: [", 'did you mean "equal"?'),
        (SOUND, "grid: {sync.interval_steps: [5, 10]", "grid: {sync.interval_steps: 5", "(5) must be a list"),
        (SOUND, "  nodes: 4", "  nodes: 4\n  nodes: 3", "run.nodes is given twice, first on line 6"),
        (SOUND, "  spes:", "  sp/es:", "must be made of at most 80 letters"),
        (SOUND, "exclude: [", "exclude: [{merge.alpha: 0.1}, {merge.alpha: 0.2}, ", "has no point left"),
        (SEARCH, "role: reference", "role: referenc", 'did you mean "reference"?'),
        (SEARCH, "spes: {method: spes}", "spes: 5", "must be a mapping such as {method: spes}"),
    ],
)
def test_what_depends_on_a_mistake_is_not_told(tmp_path: Path, text: str, old: str, new: str, words: str) -> None:
    """A misspelt section, a model that is not known, an axis that cannot be read: rules about them wait."""
    assert old in text
    found = listed(tmp_path, text.replace(old, new, 1))
    assert found and all(words in line for line in found), found
