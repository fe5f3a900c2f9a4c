"""Where results come from: code, packages, interpreter and hardware, as plain data for study.json and trial.json."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "spes-workbench",
    "torch",
    "numpy",
    "grpcio",
    "protobuf",
    "xxhash",
    "tokenizers",
    "safetensors",
    "transformers",
    "datasets",
    "mlflow",
    "optuna",
    "hydra-core",
    "omegaconf",
    "lm-eval",
    "pandas",
    "matplotlib",
    "weasyprint",
)
"""Packages whose versions can change a number or its presentation."""
_GENERATED = (":(exclude)results", ":(exclude)reports")
"""What studies write themselves does not make a working tree dirty."""


def collect() -> dict[str, Any]:
    """Everything known about the origin of results made now; a part that cannot be found is None."""
    return {
        **git_state(ROOT),
        "code_digest": code_digest(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: package_version(name) for name in PACKAGES},
        "hardware": hardware(),
    }


@cache
def code_digest() -> str:
    """SHA-256 (hex) over the names and contents of the Python files of both packages.

    It also identifies installed code that has no commit.
    """
    total = hashlib.sha256()
    for package in ("spes_core", "workbench"):
        for path in sorted((ROOT / package).rglob("*.py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{path.relative_to(ROOT).as_posix()} {content}\n".encode())
    return total.hexdigest()


def hardware() -> dict[str, Any]:
    """CPU model, usable cores, memory in GiB and the names of the GPUs of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": _cpu_model(), "cores": cores, "memory_gib": _memory_gib(), "gpus": _gpus()}


def git_state(root: Path) -> dict[str, Any]:
    """Commit, whether the working tree differs from it, and SHA-256 of the difference; None without a checkout."""
    nothing = {"commit": None, "dirty": None, "diff_sha256": None, "untracked": None}
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.decode().strip()).resolve() != root:
        return nothing
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    base = "HEAD" if commit else "--cached"
    diff = _git(root, "diff", "--binary", base, "--", ".", *_GENERATED)
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", ".", *_GENERATED) or b""
    dirty = bool(diff) or bool(listed)
    return {
        "commit": commit.decode().strip() if commit else None,
        "dirty": dirty,
        "diff_sha256": hashlib.sha256((diff or b"") + b"\0" + listed).hexdigest() if dirty else None,
        "untracked": [name.decode("utf-8", "backslashreplace") for name in listed.split(b"\0") if name],
    }


def _git(root: Path, *arguments: str) -> bytes | None:
    """Output of a git command that changes nothing; None when git is absent or refuses."""
    if shutil.which("git") is None:
        return None
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


def package_version(package: str) -> str | None:
    """The version of an installed package; None when it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
