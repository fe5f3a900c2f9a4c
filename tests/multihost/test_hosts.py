"""Code copy and preflight through a real sshd on the loopback."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.processes.test_launch import wait_until
from workbench import hosts, study
from workbench.launch.checked import Checked
from workbench.launch.codecopy import Arrived, archive, deliver
from workbench.launch.hostlink import HostLink
from workbench.launch.inventory import Host, Inventory, agent_site, connector
from workbench.launch.launcher import LaunchError
from workbench.launch.preflight import _other_versions, _problems_of, check
from workbench.launch.room import Room
from workbench.provenance import PACKAGES, code_digest, package_version

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/sbin")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the fork server ends its children with prctl"),
    pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="needs ssh and sshd (openssh-server)"),
]


@pytest.fixture(scope="module")
def ssh_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A client configuration whose host `here` is a sshd of this test, and `gone` one that is not there."""
    folder = tmp_path_factory.mktemp("sshd")
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = (
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        f"PidFile {folder}/pid\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nMaxStartups 100\n"
    )
    (folder / "sshd_config").write_text(settings, encoding="utf-8")
    common = (
        f"HostName 127.0.0.1\nUser {getpass.getuser()}\nIdentityFile {folder}/user\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {folder}/known\nStrictHostKeyChecking no\nLogLevel ERROR\n"
    )
    config = folder / "ssh_config"
    config.write_text(f"Host here\nPort {port}\nHost gone\nPort 1\nHost *\n{common}", encoding="utf-8")
    if Path("/run").is_dir() and getpass.getuser() == "root":
        Path("/run/sshd").mkdir(exist_ok=True)
    log = (folder / "log").open("wb")
    sshd = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")], stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + 60
        while subprocess.run(["ssh", "-F", str(config), "here", "true"], check=False, capture_output=True).returncode:
            if sshd.poll() is not None or time.monotonic() > deadline_s:
                pytest.skip(f"sshd does not serve here: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.1)
        yield config
    finally:
        sshd.terminate()
        sshd.wait()
        log.close()


def host(ssh_config: Path, work: Path, name: str = "a", **settings: object) -> Host:
    given = {"ssh": "here", "address": "127.0.0.1", "python": sys.executable, **settings}
    return Host(name=name, work_dir=str(work), ssh_options=("-F", str(ssh_config)), **given)  # type: ignore[arg-type]


def send(there: Host) -> Arrived:
    return deliver(there.name, lambda argv: connector(there, argv), there.interpreter, there.folder)


def test_the_archive_has_the_same_bytes_each_time() -> None:
    assert archive() == archive()


def test_code_arrives_once_and_is_sent_again_where_it_was_changed(ssh_config: Path, tmp_path: Path) -> None:
    there = host(ssh_config, tmp_path / "wörk dir")
    first = send(there)
    assert (first.was_there, first.path) == (False, str(tmp_path / "wörk dir" / "code" / code_digest()))
    assert first.packages == {name: package_version(name) for name in PACKAGES}
    computed = "import workbench.provenance as p; print(p.code_digest(), p.ROOT)"
    done = subprocess.run([sys.executable, "-c", computed], cwd=first.path, env={}, capture_output=True, text=True)
    assert done.stdout.split(maxsplit=1) == [code_digest(), f"{first.path}\n"], done.stderr
    assert (Path(first.path) / "workbench" / "conf" / "launcher" / "ssh.yaml").is_file()
    assert send(there).was_there
    with (Path(first.path) / "spes_core" / "node.py").open("a") as file:
        file.write("# changed\n")
    assert not send(there).was_there
    assert send(there).was_there
    assert [path.name for path in (tmp_path / "wörk dir" / "code").iterdir()] == [code_digest()]


def test_damaged_or_hostile_archives_leave_nothing(ssh_config: Path, tmp_path: Path) -> None:
    there = host(ssh_config, tmp_path / "w")
    with pytest.raises(LaunchError, match="host a: "):
        deliver("a", lambda argv: connector(there, argv), there.interpreter, there.folder, content=b"no archive")
    assert list((tmp_path / "w" / "code").iterdir()) == []


@pytest.mark.parametrize("shell", ["sh", "tcsh", "fish"])
def test_code_and_agent_come_through_any_shell_and_past_what_it_prints(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")

    def through(argv: Sequence[str]) -> Sequence[str]:
        assert "\n" not in shlex.join(argv), "csh takes no quoted line break"
        return (shell, "-c", f"echo Welcome; printf 'It is late. '; exec {shlex.join(argv)}")

    arrived = deliver("a", through, sys.executable, str(tmp_path / "it's w"))
    there = Host(name="a", ssh="a", address="a", work_dir=str(tmp_path / "it's w"), python=sys.executable)
    agent = shlex.split(agent_site(there, arrived.path).connector[-1])
    link = HostLink("a", through(agent), lambda *_: None, lambda _: None)
    try:
        assert link.ask("facts")["package"] == f"{arrived.path}/spes_core"
    finally:
        link.close()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "echo ssh: no such jump host >&2; echo Connection closed >&2; exit 255",
            "ssh: no such jump host; Connection closed; try by hand: ssh there",
        ),
        ("echo This account is not available.; exit 1", "This account is not available."),
        ("echo sh: p: not found >&2; exit 127", r"sh: p: not found; python \(p\) must be an interpreter there"),
        ("exit 0", "its connection ended, exit status 0"),
        ("echo 'spes-bootstrap {}'", "its answer lacks 'path'"),
        ("sleep 60", "no answer came within 1 s"),
    ],
)
def test_why_no_code_arrives_is_told_in_the_words_of_whoever_knows(command: str, words: str) -> None:
    with pytest.raises(LaunchError, match=f"^host a: .*{words}"):
        deliver("a", lambda _: ("sh", "-c", command), "p", "w", content=b"", by_hand="ssh there", timeout_s=1)


def test_all_problems_of_all_hosts_are_told_at_once(ssh_config: Path, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "w")
    (tmp_path / "file").touch()
    inventory = Inventory(
        (
            host(ssh_config, tmp_path / "w"),
            host(ssh_config, tmp_path / "link", "twin", gpus=64),
            host(ssh_config, tmp_path / "x", "away", ssh="gone"),
            host(ssh_config, tmp_path / "y", "snakeless", python="/nowhere/python"),
            host(ssh_config, tmp_path / "file" / "w", "full"),
        )
    )
    with closing(check(inventory, rooms={"twin": Room(trials_bytes=10**18, copies={"data/x": 2 * 10**18})})) as found:
        problems = "\n".join(found.problems)
    for expected in (
        "host twin: it shows",
        "for the study, which needs 3e+09: checkpoints, rounds and weights 1e+09, text and first weights 2e+09; free",
        f"host twin: its work folder {tmp_path}/link is that of a too",
        "host away: ssh: connect to host 127.0.0.1 port 1: Connection refused",
        "host snakeless: ",
        "/nowhere/python",
        "host full: NotADirectoryError",
    ):
        assert expected in problems, problems
    assert "host a:" not in problems


def test_hosts_without_problems_and_one_that_cannot_reach_the_server(
    ssh_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "hosts:\n" + "".join(
        f"  - {{name: {name}, ssh: here, address: 127.0.0.1, work_dir: {tmp_path}/{name}, python: {sys.executable},"
        f" ssh_options: [-F, {ssh_config}]}}\n"
        for name in "ab"
    )
    path = tmp_path / "hosts.yaml"
    path.write_text(text, encoding="utf-8")
    assert hosts.main(["check", str(path)]) == 0, capsys.readouterr().err
    assert "2 hosts" in capsys.readouterr().out
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert hosts.main(["check", str(path), "--port", str(taken.getsockname()[1])]) == 2
    assert "host a: it cannot listen at 127.0.0.1:" in capsys.readouterr().err


def test_ctrl_c_ends_a_check_whose_host_hangs(tmp_path: Path) -> None:
    ssh, log = tmp_path / "ssh", tmp_path / "log"
    ssh.write_text(f"#!/bin/sh\necho $$ >> {shlex.quote(str(log))}\nsleep 600\n", encoding="utf-8")
    ssh.chmod(0o755)
    (tmp_path / "hosts.yaml").write_text("hosts: [{name: a, ssh: a, address: a, work_dir: w, python: p}]\n")
    argv = [sys.executable, "-m", "workbench.hosts", "check", str(tmp_path / "hosts.yaml")]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: log.exists() and bool(log.read_text()), 60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert not psutil.pid_exists(int(log.read_text()))


def test_what_facts_are_problems() -> None:
    one = Checked(Host(name="a", ssh="a", address="a", work_dir="w", python="p"), skew_s=-7.0, round_trip_s=0.5)
    one.facts = {"code_digest": "0" * 64, "package": "/old", "free_bytes": 1e6, "gpus": [], "work": "/w"}
    problems = "\n".join(_problems_of(one))
    for expected in ("runs the code 000000000000 from /old", "0.001 GB free", "7.0 s behind the one here"):
        assert expected in problems
    fine = {"code_digest": code_digest(), "package": "/p", "free_bytes": 1e12, "gpus": [], "work": "/w"}
    assert list(_problems_of(replace(one, facts=fine, skew_s=2.2))) == []


def test_versions_are_told_with_both_values() -> None:
    packages = {name: package_version(name) for name in PACKAGES} | {
        "torch": "1.0", "numpy": None, "grpcio": None, "spes-workbench": None,
    }  # fmt: skip
    told = list(_other_versions(Arrived(path="", was_there=False, python="3.8.1", packages=packages)))
    assert len(told) == 3
    assert "Python 3.8.1 there" in told[0]
    missing = f"numpy {package_version('numpy')}, grpcio {package_version('grpcio')}"
    assert told[1] == f"its Python has no {missing}: install them there, or name another interpreter as python"
    assert told[2] == f"torch 1.0 there, {package_version('torch')} here: install the same"


STUDY = """\
schema: 1
name: small
question: Is it so?
defaults: [model/tiny, data/default]
arms: {spes: {method: spes, nodes: 4}}
seeds: [0]
launcher: ssh
"""


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_a_study_whose_hosts_have_no_room_or_do_not_answer_creates_nothing(
    tmp_path: Path, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study.yaml").write_text(STUDY, encoding="utf-8")
    lines = [
        f"  - {{name: {name}, ssh: nobody@{name}.invalid, address: {name}, work_dir: w, python: python3, nodes: 2}}"
        for name in "ab"
    ]
    folders = ["--results", str(tmp_path / "results"), "--reports", str(tmp_path / "reports")]
    command = [str(tmp_path / "study.yaml"), *folders, *option]
    assert study.main(command) == 2
    assert "python -m workbench.hosts template" in capsys.readouterr().err
    (tmp_path / "hosts.yaml").write_text("hosts:\n" + lines[0] + "\n", encoding="utf-8")
    assert study.main(command) == 2
    assert "launcher.inventory has no room for" in capsys.readouterr().err
    (tmp_path / "hosts.yaml").write_text("\n".join(["hosts:", *lines, ""]), encoding="utf-8")
    status, (out, err) = study.main(command), capsys.readouterr()
    if option:
        assert (status, "1 trials: server on a; nodes 0, 1 on a; nodes 2, 3 on b" in out) == (0, True)
    else:
        assert status == 2
        assert "error: host a: " in err
        assert "error: host b: " in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts.yaml", "study.yaml"]
