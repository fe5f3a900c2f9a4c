"""Tables that say where the study and its numbers come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from workbench.report.document import Column, Table
from workbench.report.evidence import Evidence
from workbench.report.printing import metric_name
from workbench.report.tables import text


def provenance_table(evidence: Evidence) -> Table:
    """Where the study comes from and what it ran on."""
    rows = [{"what": what, "value": value} for what, value in provenance_rows(evidence) if value]
    return Table(
        id="provenance",
        title="Provenance",
        caption="Of the study at its start; provenance.json beside this report holds the whole of it.",
        frame=pd.DataFrame(rows),
        columns=(
            Column(key="what", heading="", show=text, align="left"),
            Column(key="value", heading="", show=text, align="left"),
        ),
    )


def provenance_rows(evidence: Evidence) -> list[tuple[str, str]]:
    """The provenance as pairs of words."""
    study = evidence.study
    found = dict(study.get("provenance") or {})
    hardware = dict(found.get("hardware") or {})
    packages = dict(found.get("packages") or {})
    digests = {str(t.part("data").get("digest")) for t in evidence.trials if t.part("data").get("digest")}
    gpus = hardware.get("gpus") or []
    return [
        ("study file", str(study.get("study_file", ""))),
        ("started", str(study.get("created_at", ""))),
        ("commit", f"{found.get('commit') or 'none'}{_dirty(found)}"),
        ("code digest", str(found.get("code_digest") or "")[:16]),
        ("data digest", ", ".join(sorted(digest[:16] for digest in digests))),
        ("seeds", ", ".join(str(seed) for seed in evidence.seeds)),
        ("Python", str(found.get("python") or "")),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
        ("processor", _processor(hardware)),
        ("GPUs", ", ".join(str(gpu) for gpu in gpus) if gpus else "none"),
    ]


def _dirty(found: Mapping[str, Any]) -> str:
    if not found.get("dirty"):
        return ", without uncommitted changes" if found.get("commit") else ""
    digest = str(found.get("diff_sha256") or "")[:12]
    return f", with uncommitted changes{f' (diff {digest})' if digest else ''}"


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
            "end: tokens, wall_time_s, validate_s, compute_s",
        ),
        (
            "time shares",
            "time_s",
            "end: compute_s, serialise_s, transfer_s, wait_s, merge_s, aggregate_s, data_s",
        ),
        ("learning curves", "curves", "train: loss_nats; validation; round"),
        ("expert load", "expert_load, moe/load_imbalance", "load: expert_tokens"),
        ("merges", "merge/count", "round: merged"),
    ]
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
