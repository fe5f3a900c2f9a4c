"""Launching: children are ordinary processes of their own session, and none outlives whoever started it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from workbench.launch.forkserver import ForkLauncher
from workbench.launch.launcher import Launcher, LaunchError, Running, signal_group, stop
from workbench.launch.local import SubprocessLauncher
from workbench.processes import ProcessSpec

pytestmark = pytest.mark.processes

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the fork server ends its children with prctl")

STUB = str(Path(__file__).with_name("stub.py"))
QUICK = ("json",)
"""A fork server that loads next to nothing starts in a tenth of a second."""


@pytest.fixture(params=[pytest.param("fork server", marks=LINUX), "subprocess"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    with ForkLauncher(QUICK) if request.param == "fork server" else SubprocessLauncher() as launcher:
        yield launcher


@pytest.fixture
def fork_launcher() -> Iterator[ForkLauncher]:
    with ForkLauncher(QUICK) as launcher:
        yield launcher


def spec(*arguments: str, name: str = "stub", env: dict[str, str] | None = None) -> ProcessSpec:
    return ProcessSpec(name=name, argv=(sys.executable, STUB, *arguments), env=env or {})


def ended(launcher: Launcher, process: Running, timeout_s: float = 20) -> int:
    wait_until(lambda: launcher.wait([process], 0.1) or process.returncode is not None, timeout_s)
    assert process.returncode is not None
    return process.returncode


def wait_until(holds: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def read_pid(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())


def test_a_child_leads_its_own_session_and_writes_to_its_log(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    log = tmp_path / "mit Leerzeichen é.log"
    env = {"FOO": "b a=r", "PYTHONIOENCODING": "utf-8"}
    assert ended(launcher, launcher.start(spec("describe", "x y", "ü", env=env), log)) == 0
    assert sorted(log.read_text(encoding="utf-8").splitlines()) == [
        "bytecode may be written: True",
        "group leader: True, session leader: True",
        "stdin: '', arguments: ['x y', 'ü'], FOO: 'b a=r'",
        "to stderr: ü",
    ]


@pytest.mark.parametrize(("arguments", "returncode"), [(("exit", "0"), 0), (("exit", "7"), 7), (("segfault",), -11)])
def test_the_return_code_tells_exit_status_and_signal(
    launcher: Launcher, tmp_path: Path, arguments: tuple[str, ...], returncode: int
) -> None:
    assert ended(launcher, launcher.start(spec(*arguments), tmp_path / "log")) == returncode


@LINUX
def test_a_command_that_does_not_exist_fails_with_a_reason(fork_launcher: ForkLauncher, tmp_path: Path) -> None:
    missing = ProcessSpec(name="x", argv=("/nonexistent/python", "-c", ""), env={})
    assert ended(fork_launcher, fork_launcher.start(missing, tmp_path / "log")) == 127
    assert "error: /nonexistent/python cannot be started" in (tmp_path / "log").read_text()


def test_a_log_that_cannot_be_written_is_a_launch_error(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"stub cannot be started: .*No such file"):
        launcher.start(spec("exit", "0"), tmp_path / "missing folder" / "log")


@LINUX
def test_a_module_run_in_the_fork_behaves_like_python_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fork stubs").mkdir()
    (tmp_path / "fork stubs" / "probe.py").write_text(
        textwrap.dedent("""
            import os, sys, signal
            print(__name__, sys.argv[1:], os.path.basename(sys.argv[0]), __spec__.name)
            print(sys.modules["__main__"].__file__)
            print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
            print(os.environ["OMP_NUM_THREADS"], len(os.listdir("/proc/self/fd")), signal.pthread_sigmask(0, ()))
            sys.exit("the end")
        """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fork stubs"))
    env = {"OMP_NUM_THREADS": "3"}
    argv = (sys.executable, "-m", "probe", "a b", "ü")
    plain = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    for preloaded in (QUICK, (*QUICK, "probe_that_is_missing"), (*QUICK, "textwrap")):
        log = tmp_path / f"{len(preloaded)}-{preloaded[-1]}.log"
        with ForkLauncher(preloaded) as launcher:
            process = launcher.start(ProcessSpec(name="probe", argv=argv, env=env), log)
            assert ended(launcher, process) == plain.returncode == 1
            assert launcher.forks
        assert log.read_text() == plain.stdout + plain.stderr


@LINUX
def test_an_exception_in_the_fork_leaves_its_traceback_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks.py").write_text("import sys\nprint('before')\nraise RuntimeError('broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with ForkLauncher(QUICK) as launcher:
        argv = (sys.executable, "-m", "breaks")
        assert ended(launcher, launcher.start(ProcessSpec(name="b", argv=argv, env={}), tmp_path / "log")) == 1
    lines = (tmp_path / "log").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "RuntimeError: broken")


def test_stopping_kills_what_ignores_sigterm(launcher: Launcher, tmp_path: Path) -> None:
    stubborn = launcher.start(spec("ignore-sigterm"), tmp_path / "stubborn.log")
    obedient = launcher.start(spec("sleep"), tmp_path / "obedient.log")
    wait_until(lambda: "ready" in (tmp_path / "stubborn.log").read_text())
    started = time.monotonic()
    stop(launcher, [stubborn, obedient], grace_s=0.5)
    assert (stubborn.returncode, obedient.returncode) == (-signal.SIGKILL, -signal.SIGTERM)
    assert 0.4 < time.monotonic() - started < 3


@LINUX
def test_what_a_dead_child_leaves_behind_is_killed_even_in_another_session(
    fork_launcher: ForkLauncher, tmp_path: Path
) -> None:
    assert ended(fork_launcher, fork_launcher.start(spec("orphan", str(tmp_path / "pid")), tmp_path / "log")) == 0
    wait_until(lambda: is_gone(read_pid(tmp_path / "pid")))


def test_closing_the_launcher_ends_every_process(launcher: Launcher, tmp_path: Path) -> None:
    process = launcher.start(spec("sleep"), tmp_path / "log")
    launcher.close()
    assert process.pid is not None and is_gone(process.pid)


@LINUX
def test_killing_the_fork_server_ends_its_children_and_the_next_start_begins_a_new_one(
    fork_launcher: ForkLauncher, tmp_path: Path
) -> None:
    process = fork_launcher.start(spec("ignore-sigterm"), tmp_path / "log")
    wait_until(lambda: "ready" in (tmp_path / "log").read_text())
    killed = fork_launcher.pid
    os.kill(killed, signal.SIGKILL)
    assert ended(fork_launcher, process) == -signal.SIGKILL
    wait_until(lambda: is_gone(process.pid or 0))
    assert ended(fork_launcher, fork_launcher.start(spec("exit", "3"), tmp_path / "log")) == 3
    assert fork_launcher.pid != killed


@LINUX
def test_a_fork_server_that_cannot_start_is_a_launch_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "psutil.py").write_text("raise RuntimeError('no psutil here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with ForkLauncher(QUICK) as launcher, pytest.raises(LaunchError, match="no psutil here"):
        launcher.wait_ready()


@LINUX
def test_signalling_a_process_that_has_just_gone_is_no_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    gone.wait()
    signal_group(gone.pid, signal.SIGTERM)


@LINUX
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_no_process_outlives_the_controller(tmp_path: Path, number: int) -> None:
    """The controller runs three children, one of which has a child in a session of its own."""
    script = textwrap.dedent(f"""
        import signal, sys, time
        from pathlib import Path
        from workbench.launch.forkserver import ForkLauncher
        from workbench.processes import ProcessSpec
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started by nohup, which ignores it
        launcher = ForkLauncher({QUICK!r})
        folder = Path(sys.argv[1])
        for name, *arguments in (("a", "sleep"), ("b", "ignore-sigterm"), ("c", "orphan", str(folder / "d"), "--stay")):
            argv = (sys.executable, {STUB!r}, *arguments)
            process = launcher.start(ProcessSpec(name=name, argv=argv, env={{}}), folder / (name + ".log"))
            (folder / name).write_text(str(process.pid))
        (folder / "e").write_text(str(launcher.pid))
        time.sleep(300)
    """)
    controller = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    pids = [read_pid(tmp_path / name) for name in "abcde"]
    assert not any(is_gone(pid) for pid in pids)
    controller.send_signal(number)
    controller.wait()
    wait_until(lambda: all(is_gone(pid) for pid in pids))
