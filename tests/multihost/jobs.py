"""Trials as jobs of a cluster, driven from a test as a study's controller drives them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from tests.multihost.slurmd import Slurm
from tests.small_corpora import texts
from workbench.corpora import prepare_corpus
from workbench.execute import ExecutionSettings, run_trial
from workbench.launch.local import open_launcher
from workbench.provenance import collect
from workbench.slurm.trials import SlurmTrials
from workbench.spec import read_study
from workbench.stopping import Rule, StopRequest
from workbench.store import Stored, StudyFolder
from workbench.study import find_corpora
from workbench.trials import Corpus, expand, identify

STUDY = """\
schema: 1
name: small
question: Does a cluster give the same bits?
run:
  nodes: 2
  budget_tokens: 51_200
  model: {num_layers: 1, d_model: 16, num_heads: 2, num_kv_heads: 2, num_experts: 4, expert_hidden: 16, vocab_size: 300}
  data: {corpus: corpus, tokenizer_vocab_size: 300, validation_fraction: 0.2, sequence_length: 32,
         global_batch_sequences: 8}
  sync: {interval_steps: 2}
  validation: {max_sequences: 8, interval_tokens: 2_048}
  checkpoint: {interval_steps: 2}
  link: {rtt_ms: 25, emulate: true}
arms:
  spes: {method: spes}
resources: {parallel_trials: auto, timeout: 10min}
launcher: {kind: slurm, device: cpu, slurm: {memory_gb: 2}}
report: {formats: [html]}
"""


class Jobs:
    """One trial of a study as a job, in a results folder of its own; `start` follows it in a thread."""

    def __init__(self, folder: Path, name: str, *overrides: str) -> None:
        """``folder``: where the study file and its corpus are; ``overrides``: changes to the study."""
        self._study = read_study(folder / "small.yaml", overrides)
        variants = expand(self._study)
        corpora = find_corpora(self._study, variants) or {
            corpus: prepare_corpus(corpus) for corpus in {Corpus.of(variant.config.data) for variant in variants}
        }
        (self.trial,) = identify(self._study, variants, lambda corpus: corpora[corpus].header.digest)
        self._settings = ExecutionSettings(
            data_dir=next(iter(corpora.values())).folder,
            device="cpu",
            timeout_s=self._study.resources.timeout_s,
            provenance=collect(),
        )
        self._folder = StudyFolder(folder / name)
        self.dir = self._folder.trial_dir(self.trial)
        self.stop = StopRequest()

    def start(self, rules: Callable[[], list[Rule]] = list) -> Future[Stored]:
        """Submit the trial where no job has it, and follow its job to the end."""
        trials = SlurmTrials(self._study, self._folder, lambda _: self._settings)
        trials.submit([self.trial])
        return in_thread(lambda: trials.run(self.trial, lambda _: None, rules, self.stop))

    def run_here(self, rules: Sequence[Rule] = ()) -> dict[str, Any]:
        """Run the trial on this machine, without Slurm; what result.json holds."""
        with open_launcher() as launcher:
            return run_trial(self.trial, self.dir, self._settings, launcher, None, StopRequest(), rules)

    @property
    def job(self) -> str:
        """The newest job of the trial, as Slurm names it."""
        return str(json.loads((self.dir / "slurm.json").read_text())["job"])

    @property
    def steps(self) -> int:
        """How many steps node 0 has recorded."""
        return lines(self.dir / "events" / "node-0.jsonl", '"train"')

    @property
    def weights(self) -> bytes:
        """The final weights."""
        return (self.dir / "weights" / "final.safetensors").read_bytes()

    @property
    def result(self) -> dict[str, Any]:
        """Content of result.json; empty while there is none."""
        file = self.dir / "result.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Do something in a thread that a failed test does not wait for."""
    end: Future[Any] = Future()

    def carry_out() -> None:
        try:
            end.set_result(work())
        except BaseException as error:
            end.set_exception(error)

    threading.Thread(target=carry_out, daemon=True).start()
    return end


def write_study(folder: Path) -> None:
    """The study file and its corpus."""
    (folder / "corpus").mkdir()
    for number, text in enumerate(texts(80)):
        (folder / "corpus" / f"{number}.txt").write_text(text, encoding="utf-8")
    study = STUDY.replace("corpus: corpus", f"corpus: {folder / 'corpus'}")
    (folder / "small.yaml").write_text(study, encoding="utf-8")


def lines(file: Path, word: str) -> int:
    """How many lines of a file hold a word; 0 while there is none."""
    return sum(word in line for line in file.read_text().splitlines()) if file.exists() else 0


def wait_until(is_so: Callable[[], Any], timeout_s: float = 240) -> Any:
    """What ``is_so`` returns, once it is true."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return found


def main_process(slurm: Slurm, job: str) -> psutil.Process:
    """The process in a job that runs its trial."""
    number = field(slurm, job, "JobId")
    (found,) = [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if "submitit.core._submit" in (process.info["cmdline"] or [])[1:5]
        and (process.info["environ"] or {}).get("SLURM_JOB_ID") == number
        and (process.info["environ"] or {}).get("SLURM_CONF") == slurm.env["SLURM_CONF"]
        and "SLURM_PROCID" in (process.info["environ"] or {})
    ]
    return found


def field(slurm: Slurm, job: str, name: str) -> str:
    """What scontrol says of a job."""
    words = slurm.command("scontrol", "show", "job", "--oneliner", job).split()
    return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))
