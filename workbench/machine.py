"""What this machine has and lends: cores, memory, GPUs, and how often the kernel killed a process for memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Cores that this process may use: its affinity, and the quota of its control groups rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = []
    for folder in _control_groups("cpu", root):
        words = _read(folder / "cpu.max").split() or [
            _read(folder / "cpu.cfs_quota_us").strip(),
            _read(folder / "cpu.cfs_period_us").strip(),
        ]
        if len(words) == 2 and all(re.fullmatch(r"\d+", word) for word in words) and int(words[1]):
            quotas.append(-(-int(words[0]) // int(words[1])))
    return max(1, min([cores, *quotas]))


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Bytes that new processes can take without swapping: what the system has left, or less in a control group."""
    left = [int(psutil.virtual_memory().available)]
    for folder in _control_groups("memory", root):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
            left.append(limit - used + (int(cached[1]) if cached else 0))
    return max(0, min(left))


def visible_gpus(root: Path = _ROOT) -> tuple[str, ...]:
    """Names of the GPUs that processes started here see, as CUDA_VISIBLE_DEVICES takes them; found without a driver."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(name.strip() for name in named.split(",") if name.strip() not in ("", "-1"))
    devices = sorted((root / "dev").glob("nvidia[0-9]*"))
    return tuple(str(index) for index in range(len(devices)))


def oom_kills(root: Path = _ROOT) -> int:
    """How many processes the kernel has killed for memory: in this control group, else on the whole system."""
    for folder in _control_groups("memory", root):
        counts = _read(folder / "memory.events") or _read(folder / "memory.oom_control")
        if found := re.search(r"^oom_kill (\d+)$", counts, re.MULTILINE):
            return int(found[1])
    found = re.search(r"^oom_kill (\d+)$", _read(root / "proc/vmstat"), re.MULTILINE)
    return int(found[1]) if found else 0


def resident_bytes(pids: Sequence[int]) -> int:
    """Memory of processes and all that they started; pages that several share are divided among them."""
    total = 0
    for pid in pids:
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
        for member in family:
            try:
                info = member.memory_full_info()
            except psutil.Error:
                continue
            total += int(getattr(info, "pss", info.rss))
    return total


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of this process's control group and of those around it, innermost first, in both versions of Linux's."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, names, path = line.split(":", 2)
        if number == "0":
            mount = root / "sys/fs/cgroup"
        elif controller in names.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = mount / path.lstrip("/")
        # In a container the path may be that of the host, and only the mount itself is there.
        yield from (outer for outer in (folder, *folder.parents) if outer.is_relative_to(mount) and outer.is_dir())


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
