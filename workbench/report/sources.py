"""Tables that say where the study and its numbers come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from workbench.metrics import domain_of
from workbench.report import origins
from workbench.report.document import Column, Table
from workbench.report.evidence import Evidence
from workbench.report.printing import metric_name
from workbench.report.tables import text


def provenance_table(evidence: Evidence) -> Table:
    """Where the numbers come from and what they were made on."""
    rows = [{"what": what, "value": value} for what, value in provenance_rows(evidence) if value]
    return Table(
        id="provenance",
        title="Provenance",
        caption="As the trials recorded it when they ran. Rendered with: the code of the study's newest run, which"
        " wrote this report. provenance.json beside this report holds the whole of it.",
        frame=pd.DataFrame(rows),
        columns=(
            Column(key="what", heading="", show=text, align="left"),
            Column(key="value", heading="", show=text, align="left"),
        ),
    )


def provenance_rows(evidence: Evidence) -> list[tuple[str, str]]:
    """The provenance as pairs of words; where trials differ, all of their values."""
    present = origins.present(evidence)
    digests = {str(t.part("data").get("digest")) for t in evidence.trials if t.part("data").get("digest")}

    def of_trials(read: Callable[[dict[str, Any]], str]) -> str:
        return "; ".join(origins.different(evidence, read))

    return [
        ("study file", str(evidence.study.get("study_file", ""))),
        ("started", origins.started_at(evidence)),
        ("commit", of_trials(origins.commit)),
        ("code digest", of_trials(_code)),
        ("data digest", ", ".join(sorted(digest[:16] for digest in digests))),
        ("seeds", ", ".join(str(seed) for seed in evidence.seeds)),
        ("Python", of_trials(lambda found: str(found.get("python") or ""))),
        ("packages", of_trials(_packages)),
        ("processor", of_trials(lambda found: _processor(found.get("hardware") or {}))),
        ("GPUs", of_trials(_gpus)),
        ("rendered with", ", ".join(filter(None, (origins.commit(present), f"code {_code(present)}")))),
    ]


def _code(provenance: Mapping[str, Any]) -> str:
    return str(provenance.get("code_digest") or "")[:16]


def _packages(provenance: Mapping[str, Any]) -> str:
    versions = provenance.get("packages") or {}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _gpus(provenance: Mapping[str, Any]) -> str:
    return ", ".join(str(gpu) for gpu in (provenance.get("hardware") or {}).get("gpus") or []) or "none"


def _processor(hardware: Mapping[str, Any]) -> str:
    parts = [str(hardware["cpu"])] if hardware.get("cpu") else []
    parts += [f"{hardware['cores']} cores"] if hardware.get("cores") else []
    parts += [f"{hardware['memory_gib']} GiB memory"] if hardware.get("memory_gib") else []
    return ", ".join(parts)


def sources_table(evidence: Evidence) -> Table:
    """Which events each number comes from, so that any of them can be recomputed by hand."""
    rows = [
        (
            metric_name(evidence.metric),
            evidence.metric,
            "validation: Σ loss_sum_nats / Σ target_tokens of the last step",
        ),
        (
            "uplink, downlink",
            "comm/uplink_gb, comm/downlink_gb",
            "round: payload + framing bytes (collective: bytes_sent)",
        ),
        (
            "predicted bytes, memory",
            "comm/…_predicted_gb, memory.predicted",
            "computed from run.json, no event",
        ),
        ("memory parts, process", "memory.measured, mem/…", "memory: …_bytes, rss_peak_bytes"),
        (
            "tokens/s",
            "perf/tokens_per_s, perf/tokens_per_s_compute",
            "end: tokens, wall_time_s, validate_s; compute_s in arms with rounds",
        ),
        (
            "time shares",
            "time_s",
            "end: compute_s, serialise_s, transfer_s, wait_s, merge_s, aggregate_s, data_s",
        ),
        (
            "time of a round",
            "perf/round_time_s, perf/round_time_predicted_s",
            "end: serialise_s, transfer_s, wait_s, merge_s, aggregate_s over all rounds; run.json",
        ),
        ("learning curves", "curves", "train: loss_nats; validation; round"),
        ("expert load", "expert_load, moe/load_imbalance", "load: expert_tokens"),
        ("merges", "merge/count", "round: merged"),
    ]
    if any(trial.part("curves").get("experts") for trial in evidence.done):
        rows.append(("similarity of experts", "curves.experts", "experts: similarity"))
    if any(domain_of(metric) for trial in evidence.done for metric in trial.metrics):
        rows.insert(1, ("validation by domain", "eval/loss/…, eval/bits_per_byte/…", "validation: domains"))
    return Table(
        id="sources",
        title="Where each number comes from",
        caption="Fields of a trial's result.json, and the events in its events/*.jsonl that they are computed from.",
        frame=pd.DataFrame(rows, columns=["number", "field", "events"]),
        columns=tuple(
            Column(key=key, heading=head, show=text, align="left")
            for key, head in (("number", "number"), ("field", "in result.json"), ("events", "from events"))
        ),
    )
