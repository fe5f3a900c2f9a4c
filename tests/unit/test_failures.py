"""Naming the process that failed first, and why."""

import subprocess
import sys
from pathlib import Path

import pytest

from workbench import failures
from workbench.failures import classify, describe, fails_with_peers, first_failed, log_bytes
from workbench.launch.launcher import Running


def ended(name: str, returncode: int | None, order: int) -> Running:
    process = Running(name, order)
    process.returncode, process.ended_order = returncode, order
    return process


def test_the_first_to_end_with_an_error_counts_and_not_the_first_in_the_list_or_to_end() -> None:
    processes = [
        ended("server", 1, 3),
        ended("node-0", 0, 1),
        ended("node-1", -9, 2),
        ended("node-2", None, 0),
    ]
    failed = first_failed(processes)
    assert failed is not None and failed.name == "node-1"
    assert first_failed([processes[1], processes[3]]) is None


@pytest.mark.parametrize(
    ("returncode", "log", "message"),
    [
        (1, "error: old\nnoise\nerror: new\nnoise\n", "new"),
        (2, None, "node-1 ended with exit status 2"),
        (120, "", "node-1 ended with exit status 120, and not a word in its log: is its disk full? Make room"),
        (-9, "step 3\n", "node-1 was killed (SIGKILL), which the system does when memory runs out: step 3"),
        (-15, None, "node-1 was ended by signal 15 (Terminated)"),
        (1, "Traceback:\n  x\nKeyError: 'a'\n\n", "node-1 ended with exit status 1: KeyError: 'a'"),
        (
            1,
            "[rank1]: torch.OutOfMemoryError: CUDA out\n...elastic.multiprocessing.errors.ChildFailedError: \n=====\n",
            "node-1 ended with exit status 1: torch.OutOfMemoryError: CUDA out",
        ),
        (
            1,
            "Root Cause:\n  traceback : Signal 9 (SIGKILL) received by PID 7\n=====\n",
            "node-1 ended with exit status 1: Signal 9 (SIGKILL) received by PID 7",
        ),
        (1, "loaded\n[W1130 09:14 socket.cpp:207] no name\n=====\n", "node-1 ended with exit status 1: loaded"),
        (
            1,
            "  traceback : Traceback\n    assert x\n  AssertionError\n  \n====\n",
            "node-1 ended with exit status 1: AssertionError",
        ),
    ],
)  # fmt: skip
def test_the_message_is_its_last_error_line_or_how_it_ended(
    tmp_path: Path, returncode: int, log: str | None, message: str
) -> None:
    path = tmp_path / "log"
    if log is not None:
        path.write_text(log)
    assert describe(ended("node-1", returncode, 1), path).message == message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux: a file that is always full")
def test_a_process_whose_log_is_on_a_full_disk_ends_with_the_status_that_is_told_of() -> None:
    for unbuffered in ("", "1"):
        with Path("/dev/full").open("w") as full:
            argv, environment = [sys.executable, "-c", "print('words')"], {"PYTHONUNBUFFERED": unbuffered}
            process = subprocess.run(argv, env=environment, stdout=full, stderr=full, check=False)
        assert process.returncode in failures._UNWRITTEN


@pytest.mark.parametrize(
    ("returncode", "log", "fails_with_them"),
    [
        (1, "  RuntimeError: [pair.cc:537] Read error [10.0.0.1]:64431: Connection reset by peer.\n=====\n", True),
        (1, "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network\n", True),
        (1, "RuntimeError: Connection closed by peer\nerror: the corpus is empty\n", False),
        (1, "RuntimeError: Connection closed by peer\n  traceback : Signal 9 (SIGKILL) received by PID 7\n", False),
        (1, "RuntimeError: Connection closed by peer\nValueError: broken\n", False),
        (1, "", False),
        (-9, "RuntimeError: Connection closed by peer\n", False),
    ],
)
def test_a_torchrun_that_only_lost_its_peers_is_told_from_one_with_a_reason_of_its_own(
    tmp_path: Path, returncode: int, log: str, fails_with_them: bool
) -> None:
    (tmp_path / "log").write_text(log)
    assert fails_with_peers(ended("torchrun-0", returncode, 1), tmp_path / "log") is fails_with_them


def test_an_error_of_an_earlier_attempt_is_no_word_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("error: old\ntorch.OutOfMemoryError: CUDA out\nerror: the run has diverged\n")
    start_bytes = log_bytes(path)
    killed = ended("node-1", -9, 1)
    assert (classify(killed, path, start_bytes), describe(killed, path, start_bytes).log_tail) == ("failed", [])
    path.write_text(path.read_text() + "step 3\n")
    assert classify(killed, path, start_bytes) == "failed"
    assert describe(killed, path, start_bytes).message.endswith("runs out: step 3")
    assert log_bytes(tmp_path / "none") == 0


def test_only_the_last_twenty_lines_are_kept_and_a_large_log_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff" * (1 << 20) + b"\n" + "".join(f"zeile {n} ü\n" for n in range(50)).encode())
    tail = describe(ended("node-1", 1, 1), path).log_tail
    assert tail == [f"zeile {number} ü" for number in range(30, 50)]


@pytest.mark.parametrize(
    ("returncode", "log", "killed_for_memory", "status"),
    [
        (1, "Traceback (most recent call last):\n  x\nMemoryError\n", False, "oom"),
        (1, "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 9 GiB\nMemoryError\n", False, "oom"),
        (1, "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n=====\n", False, "oom"),
        (
            1,
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: not enough memory\n",
            False,
            "oom",
        ),
        (1, "error: results cannot be written: Cannot allocate memory\n", False, "oom"),
        (-6, "terminate called after throwing an instance of 'std::bad_alloc'\n", False, "oom"),
        (-9, "step 3\n", True, "oom"),
        (1, "exitcode: -9\n  traceback : Signal 9 (SIGKILL) received by PID 7\n", True, "oom"),
        (-9, "step 3\n", False, "failed"),
        (-15, "step 3\n", True, "failed"),
        (1, "error: the corpus is empty\n", True, "failed"),
        (1, "error: the training loss is nan by step 7: the run has diverged; lower optim.lr\n", False, "diverged"),
        (1, "error: l holds NaN before the upload: node 1 has diverged and ends here; lower\n", False, "diverged"),
        (1, "a document says that the run has diverged\n", False, "failed"),
    ],
)
def test_failures_are_told_apart_by_what_was_said_and_what_the_kernel_killed(
    tmp_path: Path, returncode: int, log: str, killed_for_memory: bool, status: str
) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    assert classify(ended("node-1", returncode, 1), path, killed_for_memory=killed_for_memory) == status


def test_a_process_that_the_kernel_killed_for_memory_is_said_to_be(tmp_path: Path) -> None:
    failure = describe(ended("node-1", -9, 1), tmp_path / "log", killed_for_memory=True)
    assert failure.message == "node-1 was killed (SIGKILL) by the system, which had run out of memory"
