"""Volunteers without an account: one private file and one line each, from folders of their own."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from spes_core import invitation, node, server
from spes_core.config import ParallelConfig, RunConfig
from spes_core.data.tokenize import prepare
from spes_core.errors import ConfigError, Unreachable
from spes_core.events import EventWriter, read_events
from spes_core.invitation import Invitation, exposed, invite
from spes_core.participant import settle
from spes_core.protocol import credentials, status
from spes_core.protocol.client import SyncClient
from spes_core.runfile import RunFile
from spes_core.sync.messages import make_hello
from tests.equivalence.participants import assert_bitwise_equal, tiny
from tests.processes.runs import Started, final_weights, outputs, run_all, save_run, with_corpus, write_corpus
from tests.small_rounds import small_schema
from workbench.processes import ProcessSpec

pytestmark = pytest.mark.processes
NODES, ROUNDS = 4, 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """A configuration whose corpus only the server's machine has, and that corpus tokenized."""
    folder = tmp_path_factory.mktemp("by hand")
    (folder / "corpus").mkdir()
    config = tiny(
        nodes=NODES,
        budget_tokens=2 * ROUNDS * 8 * 16,
        sync={"interval_steps": 2},
        checkpoint={"interval_rounds": 2},
        log={"interval_steps": 1},
    )
    config = with_corpus(config, write_corpus(folder / "corpus"))
    return config, prepare(config.data, folder / "cache")


def a_run(corpus: tuple[RunConfig, Path], **changes: Any) -> RunFile:
    config, data_dir = corpus
    usual = {"trial": "ünser run/1", "config": config, "data_dir": str(data_dir), "device": "cpu"}
    return RunFile(**{**usual, "server_address": "127.0.0.1:5200", **changes})


@pytest.fixture
def invited(corpus: tuple[RunConfig, Path], tmp_path: Path) -> Path:
    """A folder with the invitations of a run."""
    invite(a_run(corpus), tmp_path / "made", None)
    return tmp_path / "made"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(name: str, log: Path, *argv: str) -> Started:
    module = "spes_core.server" if name == "server" else "spes_core.node"
    return Started(ProcessSpec(name=name, argv=(sys.executable, "-m", module, *argv), env={}), log)


def until(condition: Any, process: Started, timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s and process.poll() is None, process.output
        time.sleep(0.01)


def steps(folder: Path) -> list[int]:
    path = folder / "events" / "node-2.jsonl"
    return [event["step"] for event in read_events(path) if event["kind"] == "train"] if path.exists() else []


def test_invitations_alone_make_a_run_with_the_bits_of_a_local_one_and_who_is_killed_comes_back(
    corpus: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    config, data_dir = corpus
    save_run(config, data_dir, tmp_path / "local")
    run_all(tmp_path / "local")

    at = tmp_path / "server"
    save_run(config, data_dir, at)
    address, keys = f"127.0.0.1:{free_port()}", str(at / "keys")
    log = tmp_path / "server.log"
    processes = {"server": start("server", log, str(at / "run.json"), "--credentials", keys, "--listen", address)}
    until(lambda: (at / "server.address").exists(), processes["server"])
    told = processes["server"].output
    lines = [line.strip() for line in told.splitlines() if line.startswith("  python")]
    assert "Each is a secret" in told and len(lines) == NODES
    assert lines[2] == "python -m spes_core.node node-2.invite --data CORPUS_FOLDER"

    def participant(index: int) -> Started:
        home = tmp_path / f"home-{index}"
        home.mkdir(exist_ok=True)
        shutil.copy(at / "keys" / f"node-{index}.invite", home)
        words = [str(data_dir) if word == "CORPUS_FOLDER" else word for word in lines[index].split()[3:]]
        words[0] = str(home / words[0])
        return start(f"node-{index}", tmp_path / f"node-{index}.log", *words, "--folder", str(home / "own"))

    processes |= {f"node-{index}": participant(index) for index in range(NODES)}
    own = tmp_path / "home-2" / "own"
    until(lambda: len(steps(own)) >= 3, processes["node-2"])
    processes["node-2"].kill()
    processes["node-2"].wait(20)
    processes["node-2"] = participant(2)
    found = outputs(processes, 120)
    assert all(status == 0 for status, _ in found.values()), found

    assert_bitwise_equal(final_weights(at), final_weights(tmp_path / "local"))
    assert steps(own) == list(range(1, 2 * ROUNDS + 1))
    for index in range(NODES):
        names = {item.name for item in (tmp_path / f"home-{index}").iterdir()}
        assert names == {f"node-{index}.invite", "own"}


def test_a_second_process_with_the_same_invitation_in_the_same_folder_is_refused(
    corpus: tuple[RunConfig, Path],
    invited: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("spes_core.events._LOCK_WAIT_S", 0.1)
    line = [str(invited / "node-3.invite"), "--data", str(corpus[1]), "--folder", str(tmp_path / "own")]
    settle(invited / "node-3.invite", data=corpus[1], init=None, folder=tmp_path / "own")
    first = EventWriter(tmp_path / "own" / "events" / "node-3.jsonl")
    try:
        assert node.main(line) == 2
    finally:
        first.close()
    told = capsys.readouterr().err
    assert "node-3.jsonl" in told and "another process" in told and told.count("\n") == 1


def test_what_is_made_is_private_made_once_and_for_the_public_name(
    corpus: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    run = a_run(corpus, server_address="0.0.0.0:5200")
    folder = tmp_path / "made"
    served, _ = invite(run, folder, "lab.example.org:7000")
    assert served.credentials == str(folder) and served.server_address == "0.0.0.0:5200"
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    first = Invitation.load(folder / "node-3.invite")
    assert first.address == "lab.example.org:7000" and first.node == 3 and first.config == run.config
    assert "KEY" not in repr(first) and first.token not in repr(first)
    invite(run, folder, "lab.example.org:7001")
    again = Invitation.load(folder / "node-3.invite")
    assert again == replace(first, address="lab.example.org:7001")
    with pytest.raises(ConfigError, match=r'"other.example.org"\) is not among the names of server.pem .*new folder'):
        invite(run, folder, "other.example.org:7000")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--credentials", "DIR"], '--listen ("127.0.0.1:0") must be HOST:PORT with a port above 0'),
        (["--credentials", "DIR", "--listen", "0.0.0.0:5"], "is no address that can be called; name this machine"),
        (["--credentials", "DIR", "--listen", "127.0.0.1:5", "--public", "nowhere"], '--public ("nowhere") must be'),
        (["--credentials", "DIR", "--listen", "unix:/tmp/x:5"], '--listen ("unix:/tmp/x:5") must be HOST:PORT'),
        (["--listen", "0.0.0.0:5"], "leaves this machine, and the run has no certificates"),
        (["--public", "a:5"], "--public is written into invitations"),
        (["--listen", "5200"], 'error: --listen ("5200") must be host:port, for instance 0.0.0.0:5200'),
    ],
)
def test_a_server_that_cannot_invite_says_why_and_makes_nothing(
    corpus: tuple[RunConfig, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    a_run(corpus, server_address="127.0.0.1:0").save(tmp_path / "run.json")
    given = [word.replace("DIR", str(tmp_path / "made")) for word in arguments]
    assert server.main([str(tmp_path / "run.json"), *given]) == 2
    assert text in capsys.readouterr().err
    assert [item.name for item in tmp_path.iterdir()] == ["run.json"]


def resigned(content: dict[str, Any]) -> dict[str, Any]:
    """What somebody who knows the format makes of it."""
    rest = {key: value for key, value in content.items() if key not in ("spes_invitation", "sha256")}
    return {**content, "sha256": invitation._digest(rest)}


def changed(content: dict[str, Any], **changes: Any) -> str:
    return json.dumps(resigned({**content, **changes}))


HOSTILE = {
    "empty": (lambda c: "", "is damaged, or no invitation"),
    "torn": (lambda c: json.dumps(c)[:-9], "is damaged, or no invitation"),
    "nested": (lambda c: "[" * 200_000, "is damaged, or no invitation"),
    "long number": (lambda c: "9" * 10_000, "is damaged, or no invitation"),
    "huge": (lambda c: json.dumps(c) + " " * (1 << 20), "is larger than the 1048576 bytes"),
    "foreign": (lambda c: '{"trial": "x"}', "is no invitation; give the node-<n>.invite"),
    "version": (lambda c: json.dumps({**c, "spes_invitation": 2}), "is of version 2, and this release reads 1"),
    "tampered": (lambda c: json.dumps({**c, "address": "evil.example.org:1"}), "does not have its SHA-256"),
    "unknown key": (lambda c: changed(c, command="rm -rf"), "command is not a setting"),
    "wrong type": (lambda c: changed(c, node="x"), "node ('x') must be a whole number"),
    "no such node": (lambda c: changed(c, node=9), "node (9) must be from 0 to nodes − 1 (3)"),
    "another node": (lambda c: changed(c, node=1), 'that is for "node-3", and not for "node-1"'),
    "transport": (lambda c: changed(c, address="unix:/run/x.sock:1"), 'address ("unix:/run/x.sock:1") must be'),
    "config": (lambda c: changed(c, config={**c["config"], "nodes": 0}), "nodes (0) must be"),
    "half character": (lambda c: changed(c, key="\ud800"), "is damaged, or no invitation"),
    "no key": (lambda c: changed(c, key="-----"), "that is no certificate or key"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_invitation_that_is_not_what_the_server_wrote_is_refused_in_one_line_and_nothing_is_made(
    invited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    change, text = HOSTILE[name]
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    path = home / "node-3.invite"
    path.write_text(change(json.loads((invited / "node-3.invite").read_text())))
    assert node.main([str(path)]) == 2
    told = capsys.readouterr().err
    assert text in told and str(path) in told and told.count("\n") == 1 and len(told) < 1500
    assert [item.name for item in home.iterdir()] == ["node-3.invite"]


def test_an_invitation_may_be_renamed_and_one_that_others_can_read_is_told_of(
    corpus: tuple[RunConfig, Path], invited: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed = tmp_path / "node-3.invite.txt"
    shutil.copy(invited / "node-3.invite", renamed)
    given = ["--data", str(corpus[1]), "--folder", str(tmp_path / "own"), "--node", "9"]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "other").touch()
    assert node.main([str(renamed), *given]) == 2
    assert f'--folder ("{tmp_path}/own") holds something else' in capsys.readouterr().err
    assert exposed(renamed) == ""
    renamed.chmod(0o644)
    assert f"others on this machine can read {renamed}, with which anyone takes part" in exposed(renamed)
    a_run(corpus).save(tmp_path / "run.json")
    assert node.main([str(tmp_path / "run.json"), *given]) == 2
    assert (
        f'--data ("{corpus[1]}") belongs to an invitation, and {tmp_path}/run.json is none' in capsys.readouterr().err
    )


def test_an_expired_invitation_is_named_with_its_days(
    corpus: tuple[RunConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(credentials, "_VALID_DAYS", -0.5)
        patch.setattr(credentials, "check_certificate", lambda *_: None)
        invite(a_run(corpus), tmp_path / "made", None)
    with pytest.raises(
        ConfigError, match=r"node-3\.invite\"\) has a node-3\.pem that is valid from .* to .* set the clock"
    ):
        Invitation.load(tmp_path / "made" / "node-3.invite")


def test_names_and_paths_of_an_invitation_choose_no_file_here(
    corpus: tuple[RunConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, data_dir = corpus
    weights = replace(config.init, kind="weights", weights="/etc/passwd", digest="0" * 64)
    run = a_run(corpus, trial="../../etc/cron.d/x\n", config=replace(config, init=weights))
    _, lines = invite(run, tmp_path / "made", None)
    assert lines[-1].endswith("node-3.invite --data CORPUS_FOLDER --init WEIGHTS_FILE")
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    path = tmp_path / "made" / "node-3.invite"
    with pytest.raises(ConfigError, match="--init must name the file of the run's first weights, with SHA-256 0000"):
        settle(path, data=data_dir, init=None, folder=None)
    with pytest.raises(
        ConfigError, match=r"--data must be given: data\.corpus cannot be prepared .* copy the tokenized"
    ):
        settle(path, data=None, init=home / "w", folder=None)
    assert not list(home.iterdir())
    run_file, _ = settle(path, data=data_dir, init=home / "w", folder=None)
    assert run_file == home / "spes-etc-cron.d-x-node-3" / "run.json"
    assert RunFile.load(run_file).config.init.weights == str(home / "w")
    private = run_file.parent / "credentials"
    assert {stat.S_IMODE(item.stat().st_mode) for item in private.iterdir()} == {0o600}


def test_another_text_or_a_folder_of_another_run_is_refused(
    corpus: tuple[RunConfig, Path], invited: Path, tmp_path: Path
) -> None:
    config, data_dir = corpus
    path, folder = invited / "node-3.invite", tmp_path / "own"
    other = prepare(replace(config.data, validation_fraction=0.3), tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"--data .* has the digest .*; copy the tokenized folder of this run"):
        settle(path, data=other, init=None, folder=folder)
    spoiled = shutil.copytree(data_dir, tmp_path / "spoiled")
    (spoiled / "train.bin").write_bytes(bytes((spoiled / "train.bin").stat().st_size))
    with pytest.raises(ConfigError, match=r"train\.bin does not have the SHA-256"):
        settle(path, data=spoiled, init=None, folder=folder)
    assert not folder.exists()
    first = settle(path, data=data_dir, init=None, folder=folder)
    assert settle(path, data=data_dir, init=None, folder=folder) == first
    for wrong in (invited / "node-2.invite", tmp_path / "theirs" / "node-3.invite"):
        if not wrong.exists():
            invite(a_run(corpus), wrong.parent, None)
        with pytest.raises(ConfigError, match=r"--folder .* holds another run, another node"):
            settle(wrong, data=data_dir, init=None, folder=folder)
    with pytest.raises(ConfigError, match=r"--folder .* holds something else"):
        settle(path, data=data_dir, init=None, folder=data_dir)


def test_a_corpus_that_every_machine_has_needs_no_copy(
    corpus: tuple[RunConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, _ = corpus
    small = tmp_path / "stdlib"
    small.mkdir()
    write_corpus(small)
    for text in small.glob("*.txt"):
        text.rename(text.with_suffix(".py"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(small)})
    config = replace(config, data=replace(config.data, corpus="stdlib"))
    data_dir = prepare(config.data)
    _, lines = invite(a_run((config, data_dir)), tmp_path / "made", None)
    assert lines[-1].endswith("spes_core.node node-3.invite")
    run_file, _ = settle(tmp_path / "made" / "node-3.invite", data=None, init=None, folder=tmp_path / "own")
    assert RunFile.load(run_file).data_dir == str(data_dir)
    (small / "00.py").write_text("another interpreter = True\n" * 50)
    with pytest.raises(ConfigError, match=r'has another "stdlib" than the server\'s\); copy the tokenized folder'):
        settle(tmp_path / "made" / "node-3.invite", data=None, init=None, folder=tmp_path / "other")


def test_the_server_refuses_an_invitation_of_another_server(corpus: tuple[RunConfig, Path], tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    save_run(*corpus, tmp_path / "at")
    invite(a_run(corpus, server_address=address), tmp_path / "theirs", None)
    given = (str(tmp_path / "at" / "run.json"), "--credentials", str(tmp_path / "at" / "keys"), "--listen", address)
    started = start("server", tmp_path / "server.log", *given)
    until(lambda: (tmp_path / "at" / "server.address").exists(), started)
    shown = Invitation.load(tmp_path / "theirs" / "node-0.invite")
    config = corpus[0]
    with (
        SyncClient(address, config, 0, shown.credentials, connect_timeout_s=0.3) as client,
        pytest.raises(Unreachable, match="do not accept each other's"),
    ):
        client.join(make_hello(config, small_schema(config), 0))
    answer = status.ask(address, tmp_path / "at" / "keys")
    assert {row["state"] for row in answer["nodes"]} == {"absent"}
    started.kill()
    started.wait(20)


def test_a_participant_with_several_ranks_runs_the_same_line_and_is_heard_by_nobody_else(
    corpus: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    config = replace(corpus[0], nodes=1, parallel=ParallelConfig(ranks_per_node=2), budget_tokens=4 * 8 * 16)
    save_run(config, corpus[1], tmp_path / "local")
    run_all(tmp_path / "local")
    at, address = tmp_path / "server", f"127.0.0.1:{free_port()}"
    save_run(config, corpus[1], at)
    keys = ("--credentials", str(at / "keys"), "--listen", address)
    server = start("server", tmp_path / "server.log", str(at / "run.json"), *keys)
    until(lambda: (at / "server.address").exists(), server)
    (line,) = [line.split() for line in server.output.splitlines() if line.startswith("  python")]
    assert line == ["python", "-m", "spes_core.node", "node-0.invite", "--data", "CORPUS_FOLDER"]
    given = {"node-0.invite": str(at / "keys" / "node-0.invite"), "CORPUS_FOLDER": str(corpus[1])}
    argv = (sys.executable, *(given.get(word, word) for word in line[1:]), "--folder", str(tmp_path / "own"))
    node = Started(ProcessSpec(name="node-0", argv=argv, env={}), tmp_path / "node-0.log")
    until(lambda: (tmp_path / "own" / "events" / "node-0.jsonl").exists(), node, 120)
    assert node._running.pid is not None
    leader = psutil.Process(node._running.pid)
    family = [leader, *leader.children(recursive=True)]
    assert len(family) >= 3
    open_at = {line.laddr.ip for one in family for line in one.net_connections() if line.status == "LISTEN"}
    assert open_at == {"127.0.0.1"}, "torchrun by itself would listen on every interface"
    found = outputs({"server": server, "node-0": node}, 120)
    assert all(status == 0 for status, _ in found.values()), found
    assert_bitwise_equal(final_weights(at), final_weights(tmp_path / "local"))
