"""Trials on other hosts, each an agent with a folder of its own: bits, events and files of a trial that ran here."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from spes_core.config import CheckpointConfig, RunConfig, ServerConfig
from spes_core.data.tokenize import prepare
from spes_core.events import read_events
from spes_core.runfile import RunFile
from spes_core.snapshots import ResumePoint
from tests.equivalence.participants import assert_bitwise_equal
from tests.processes.runs import final_weights, write_corpus
from tests.processes.test_launch import wait_until
from tests.processes.test_launch_engine import config, trial
from workbench.execute import ExecutionSettings, run_trial
from workbench.execute import prepare as prepare_trial
from workbench.integrity import check_files
from workbench.launch.hostlink import HostLink
from workbench.launch.launcher import LaunchError
from workbench.launch.local import open_launcher
from workbench.launch.ports import Answering, call, free_port
from workbench.launch.remote import Placement, RemoteLauncher, Site
from workbench.stopping import StopRequest

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the fork server ends its children with prctl"),
]

NODES = ("a", "a", "b", "c")
SHORT = config(steps=24, checkpoint=CheckpointConfig(interval_rounds=2))
LONG = config(steps=4000, checkpoint=CheckpointConfig(interval_rounds=2))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ExecutionSettings:
    corpus = write_corpus(tmp_path_factory.mktemp("corpus ü"))
    data = replace(config().data, corpus=str(corpus))
    return ExecutionSettings(data_dir=prepare(data, tmp_path_factory.mktemp("cache é")), device="cpu")


@pytest.fixture(scope="module")
def expected(settings: ExecutionSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the short trial, run here."""
    folder = tmp_path_factory.mktemp("local")
    with open_launcher() as launcher:
        assert run_trial(trial(SHORT), folder, settings, launcher)["status"] == "done"
    return folder


def agent(work: Path, *options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "workbench.launch.agent", "--work", str(work), *options)


def loopback() -> str:
    """This machine's own address, of IPv6 where it has that."""
    try:
        free_port("::1")
    except OSError:
        return "127.0.0.1"
    return "::1"


def test_a_port_answers_at_any_kind_of_address() -> None:
    for address in {"localhost", "127.0.0.1", loopback()}:
        port = free_port(address, 2)
        answering = Answering(address, port, "nonce", 20)
        call(address, port, "nonce", 20)
        with pytest.raises(OSError, match="something else answers"):
            call(address, port, "other", 20)
        answering.close()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts with a blank")


@pytest.fixture(scope="module")
def launcher(hosts: Path) -> Iterator[RemoteLauncher]:
    sites = [Site(name=name, connector=agent(hosts / name), address=loopback()) for name in "abc"]
    with RemoteLauncher(sites, lambda run: Placement(("a", "c")[: len(run.servers)], NODES)) as launcher:
        launcher.wait_ready()
        yield launcher
    assert processes_under(hosts) == []


def processes_under(hosts: Path) -> list[psutil.Process]:
    """All processes that name a folder of the hosts on their command line, which fork servers' children keep not."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(hosts) in word for word in process.info["cmdline"] or ()):
            found.append(process)
    return found


def family(launcher: RemoteLauncher) -> dict[str, list[psutil.Process]]:
    """By host: the agent and all that it has started."""
    found = {}
    for name in "abc":
        top = psutil.Process(launcher.link(name)._process.pid)
        found[name] = [top, *top.children(recursive=True)]
    return found


def lasting(path: Path) -> list[dict[str, Any]]:
    """Events without clocks and process ids."""
    changing = {"time_s", "tokens_per_s", "pid", "rss_peak_bytes", "address"}
    return [
        {key: value for key, value in event.items() if key not in changing and not key.endswith(("_s", "_bytes"))}
        for event in read_events(path)
        if event["kind"] not in ("memory", "resume")
    ]


def test_a_trial_on_three_hosts_is_the_trial_that_ran_here(
    launcher: RemoteLauncher, hosts: Path, settings: ExecutionSettings, expected: Path, tmp_path: Path
) -> None:
    seen: list[int] = []
    result = run_trial(trial(SHORT), tmp_path, settings, launcher, lambda progress: seen.append(progress.step))
    assert result["status"] == "done", result["error"]
    assert_bitwise_equal(final_weights(tmp_path), final_weights(expected))
    names = sorted(path.name for path in (expected / "events").iterdir())
    assert sorted(path.name for path in (tmp_path / "events").iterdir()) == names
    for name in names:
        if name != "server.jsonl":  # what it records depends on who comes first
            assert lasting(tmp_path / "events" / name) == lasting(expected / "events" / name)
    local = json.loads((expected / "result.json").read_text())
    assert result["metrics"].keys() == local["metrics"].keys()
    assert result["metrics"]["comm/uplink_gb"] == local["metrics"]["comm/uplink_gb"]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        *(f"node-{node}.log" for node in range(4)),
        "server.log",
    ]
    assert seen[-1] == SHORT.total_steps
    assert launcher._running == {}, "what has ended is not kept"
    for name in "abc":
        assert list((hosts / name / "trials").iterdir()) == [], "nothing of a trial that is done stays"
        assert len(list((hosts / name / "data").iterdir())) == 1


def test_servers_on_two_hosts_leave_the_file_of_one(
    launcher: RemoteLauncher, hosts: Path, settings: ExecutionSettings, expected: Path, tmp_path: Path
) -> None:
    two = replace(SHORT, server=ServerConfig(shards=2))
    result = run_trial(trial(two), tmp_path, settings, launcher)
    assert result["status"] == "done", result["error"]
    weights = tmp_path / "weights"
    assert [path.name for path in weights.iterdir()] == ["final.safetensors"], "the parts came, and were joined here"
    local = expected / "weights" / "final.safetensors"
    assert (weights / "final.safetensors").read_bytes() == local.read_bytes()
    run = RunFile.load(tmp_path / "run.json")
    assert [path.stem for path in sorted((tmp_path / "events").glob("server*"))] == list(run.config.servers)
    assert all(check.passed for check in check_files(tmp_path) if check.name != "trial id")


def test_each_host_holds_its_own_secrets_and_no_others(
    launcher: RemoteLauncher, hosts: Path, settings: ExecutionSettings, tmp_path: Path
) -> None:
    background = Background(launcher, settings, tmp_path, LONG)
    keys = {name: sorted(path.name for path in (hosts / name).glob("trials/*/credentials/*.key")) for name in "abc"}
    assert keys == {"a": ["node-0.key", "node-1.key", "server.key"], "b": ["node-2.key"], "c": ["node-3.key"]}
    for path in hosts.glob("*/trials/*/credentials/*"):
        assert path.stat().st_mode & 0o077 == 0
    background.request.reason = "enough"
    assert background.end()["status"] == "interrupted"
    for name, processes in family(launcher).items():
        assert [p for p in processes[1:] if "spawner" not in " ".join(p.cmdline())] == [], name


class Background:
    """A trial in a thread, once it trains."""

    def __init__(self, launcher: Any, settings: ExecutionSettings, folder: Path, run: RunConfig) -> None:
        self.result: dict[str, Any] = {}
        self.request = StopRequest()
        self.folder = folder

        def work() -> None:
            self.result.update(run_trial(trial(run), folder, settings, launcher, stop_request=self.request))

        self.thread = threading.Thread(target=work)
        self.thread.start()
        wait_until(lambda: self.step() >= 1, 120)

    def step(self) -> int:
        """The last step that node 3 has told of."""
        told = [event["step"] for event in read_events(self.folder / "events" / "node-3.jsonl") if "step" in event]
        return max(told, default=0)

    def end(self) -> dict[str, Any]:
        self.thread.join(120)
        assert not self.thread.is_alive()
        return self.result


def test_a_host_that_is_lost_ends_the_trial_and_the_same_command_goes_on_with_the_same_bits(
    launcher: RemoteLauncher, settings: ExecutionSettings, tmp_path: Path
) -> None:
    run = replace(SHORT, budget_tokens=SHORT.budget_tokens * 3)
    background = Background(launcher, settings, tmp_path / "cut", run)
    wait_until(lambda: background.step() >= 10, 120)
    before = family(launcher)
    before["b"][0].kill()
    result = background.end()
    assert result["status"] == "failed"
    assert result["error"]["message"].startswith("host b was lost (the connection ended, exit status -9), and its")
    assert result["error"]["log_tail"] == []
    wait_until(lambda: not any(process.is_running() for process in before["b"]), 20)
    launcher.wait_ready()
    assert run_trial(trial(run), tmp_path / "cut", settings, launcher)["status"] == "done"
    kinds = [event["kind"] for event in read_events(tmp_path / "cut" / "events" / "node-2.jsonl")]
    assert "resume" in kinds
    assert run_trial(trial(run), tmp_path / "whole", settings, launcher)["status"] == "done"
    assert_bitwise_equal(final_weights(tmp_path / "cut"), final_weights(tmp_path / "whole"))
    told = list(read_events(tmp_path / "cut" / "events" / "node-2.jsonl"))
    steps = [event["step"] for event in told if event["kind"] == "train"]
    assert len(steps) == len(set(steps)) > 3


def test_what_hosts_have_is_kept_until_all_of_it_is_here(
    launcher: RemoteLauncher, hosts: Path, settings: ExecutionSettings, tmp_path: Path
) -> None:
    run = prepare_trial(trial(SHORT), tmp_path, settings)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/final.safetensors").write_bytes(b"old")
    for node in (0, 3):
        (tmp_path / "logs" / f"node-{node}.log").write_text("words of an earlier attempt\n")
    points = {name: ResumePoint(4, 0) for name in ("server", "node-0", "node-1", "node-2")}
    launcher.stage(run, tmp_path, {**points, "node-3": ResumePoint(0, 0)})
    assert not (tmp_path / "logs/node-3.log").exists() and (tmp_path / "logs/node-0.log").exists()
    there = hosts / "a" / launcher._staged[tmp_path].folder
    (there / "weights").mkdir()
    (there / "weights/final.safetensors").write_bytes(b"new")
    launcher.link("b")._process.kill()
    wait_until(lambda: bool(launcher._links["b"].lost), 20)
    with pytest.raises(LaunchError, match="did not come back: host b: "):
        launcher.collect(tmp_path, is_done=True)
    assert (tmp_path / "weights/final.safetensors").read_bytes() == b"new"
    assert there.exists()
    launcher.wait_ready()
    for name in "abc":
        launcher.link(name).ask("remove", folder=f"trials/{there.name}")


def test_a_trial_above_its_memory_limit_is_stopped_on_all_hosts_by_what_they_hold_together(
    launcher: RemoteLauncher, settings: ExecutionSettings, tmp_path: Path
) -> None:
    background = Background(launcher, settings, tmp_path / "unlimited", LONG)
    running = [process for process, _ in launcher._running.values()]
    wait_until(lambda: launcher.resident_bytes(running) > 0 and len(launcher._held) == 5, 60)
    by_process = dict(launcher._held)
    background.request.reason = "enough"
    background.end()
    assert launcher.resident_bytes(running) == 0, "those that have ended hold nothing"
    limit = (sum(by_process.values()) + max(by_process.values())) // 2
    limited = replace(settings, memory_limit_bytes=limit)
    result = run_trial(trial(LONG), tmp_path / "limited", limited, launcher)
    assert result["status"] == "oom", result["error"]
    assert "GB together, above resources.trial_memory_gb" in result["error"]["message"]
    for processes in family(launcher).values():
        assert all("spawner" in " ".join(process.cmdline()) for process in processes[1:])


NEVER_DONE = """
import json, sys
print("spes-agent", flush=True)
known = {"work": "/w", "package": "/p", "python": "p", "port": 1, "sha256": None, "stored": {}}
for line in sys.stdin.buffer:
    asked = json.loads(line)
    sys.stdin.buffer.read(asked.get("bytes", 0))
    if asked["do"] != "put" and asked.get("folder") != "trials/weights":
        print(json.dumps({"event": "answer", "id": asked["id"], **known}), flush=True)
"""
"""A host that says no end of copying, like one behind a link of a few bytes a second."""


def test_who_stops_while_files_are_copied_is_not_kept_waiting(settings: ExecutionSettings, tmp_path: Path) -> None:
    request = StopRequest()
    sites = [Site(name="a", connector=(sys.executable, "-c", NEVER_DONE), address="127.0.0.1")]
    with RemoteLauncher(sites, lambda _: Placement(("a",), ("a",) * 4)) as launcher:
        launcher.is_stopped = lambda: request.made
        threading.Timer(1.0, lambda: setattr(request, "reason", "enough")).start()
        result = run_trial(trial(SHORT), tmp_path, settings, launcher, stop_request=request)
        assert (result["status"], result["error"]["message"]) == ("interrupted", "stopped: enough")
        launcher._remember("trials/weights", tmp_path, {"a": launcher.link("a")})
        launcher.is_stopped = iter([False, True]).__next__
        with pytest.raises(LaunchError, match="host a: stopped before the end of 'flush'"):
            launcher.collect(tmp_path, is_done=True)


CONTROLLER = """
import sys, pickle
from pathlib import Path
from workbench.launch.remote import Placement, RemoteLauncher, Site
from workbench.execute import run_trial
trial, settings, folder, connectors = pickle.load(open(sys.argv[1], "rb"))
sites = [Site(name=name, connector=one, address="127.0.0.1") for name, one in connectors.items()]
with RemoteLauncher(sites, lambda _: Placement(("a",), ("a", "a", "b", "c"))) as launcher:
    run_trial(trial, folder, settings, launcher)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_no_process_of_any_host_outlives_the_controller(
    number: int, settings: ExecutionSettings, tmp_path: Path
) -> None:
    """SIGSTOP stands for a controller, or a link, that is there and says nothing: the lease ends."""
    connectors = {name: agent(tmp_path / name, "--lease", "7") for name in "abc"}
    (tmp_path / "in").write_bytes(pickle.dumps((trial(LONG), settings, tmp_path / "t", connectors)))
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, str(tmp_path / "in")], start_new_session=True)
    try:
        events = tmp_path / "t" / "events" / "node-3.jsonl"
        wait_until(lambda: any("step" in event for event in read_events(events)), 120)
        started = psutil.Process(controller.pid).children(recursive=True)
        assert len(started) >= 3 + 3 + 5
        os.kill(controller.pid, number)
        wait_until(lambda: not any(is_alive(process) for process in started), 60)
    finally:
        controller.kill()
        controller.wait()


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_agent_touches_nothing_outside_its_folder_and_says_what_is_wrong(tmp_path: Path) -> None:
    link = HostLink("a", agent(tmp_path / "work"), lambda *_: None, lambda _: None)
    try:
        for path in ("../out", "/etc/motd", "a/../../out", ""):
            with pytest.raises(LaunchError, match=r"host a: .* is not below the work folder"):
                link.ask("put", b"x", path=path)
        with pytest.raises(LaunchError, match="host a: it knows no request 'dance'"):
            link.ask("dance")
        with pytest.raises(LaunchError, match=r"host a: .*unexpected keyword"):
            link.ask("put", b"x", road="a")
        link.put("a b/c", b"1" * 3_000_000)
        assert (tmp_path / "work/a b/c").read_bytes() == b"1" * 3_000_000
        link.ask("put", b"half", path="half.partial")
        assert (tmp_path / "work/half.partial").exists()
    finally:
        link.close()
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["a b"], "what was never whole is gone"
    assert not (tmp_path / "out").exists()


def test_text_on_a_host_is_told_by_its_bytes_which_are_read_once(tmp_path: Path) -> None:
    source, there = tmp_path / "text", tmp_path / "w" / "data" / "x"
    (source / "deep").mkdir(parents=True)
    for name in ("a.bin", "deep/b.bin", "empty"):
        (source / name).write_bytes(name.encode() * 3 if name != "empty" else b"")
    link = HostLink("a", agent(tmp_path / "w"), lambda *_: None, lambda _: None)
    try:
        link.put_folder(source, "data/x")
        first = {path.name: path.stat().st_ino for path in there.rglob("*")}
        link.put_folder(source, "data/x")
        assert {path.name: path.stat().st_ino for path in there.rglob("*")} == first, "nothing is sent twice"
        (there / "deep" / "b.bin").write_bytes(b"deep/b.BIN" * 3)  # of the same size
        record = next(path for path in (tmp_path / "w" / "digests").iterdir() if "/a.bin" in path.read_text())
        known = json.loads(record.read_text())
        record.write_text(json.dumps([*known[:-1], "0" * 64]))
        link.put_folder(source, "data/x")
        assert (there / "deep" / "b.bin").read_bytes() == (source / "deep" / "b.bin").read_bytes()
        assert (there / "a.bin").stat().st_ino != first["a.bin"], "its digest was not read again but remembered"
    finally:
        link.close()


def test_a_request_that_takes_longer_than_the_lease_costs_no_host(tmp_path: Path) -> None:
    link = HostLink("a", agent(tmp_path, "--lease", "2"), lambda *_: None, lambda _: None, ping_s=0.3)
    try:
        with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(LaunchError, match="cannot be called"):
            link.ask("call", address="127.0.0.1", port=deaf.getsockname()[1], nonce="n", seconds=4)
        assert link.ask("facts")["work"] == str(tmp_path)
    finally:
        link.close()


def test_an_agent_that_says_nothing_or_nonsense_is_lost_and_said_to_be(tmp_path: Path) -> None:
    lost: list[HostLink] = []
    silent = HostLink("a", agent(tmp_path), lambda *_: None, lost.append, ping_s=0.2, silence_s=3)
    silent.ask("facts")
    os.kill(silent._process.pid, signal.SIGSTOP)
    wait_until(lambda: lost == [silent], 60)
    assert "it has said nothing for" in silent.lost
    with RemoteLauncher([], lambda _: Placement(("a",), ())) as launcher:
        for said in (
            '{"a": 1}',
            '{"event": "answer"}',
            '{"event": "file"}',
            '{"event": "exited", "process": 7}',
            "[1]",
        ):
            link = HostLink("b", ("sh", "-c", f"echo spes-agent; echo '{said}'; sleep 60"), launcher._take, lost.append)
            wait_until(lambda: bool(link.lost), 20)  # noqa: B023
            assert "not of an agent" in link.lost, said
            link.close()
    silent.close()
    assert len(lost) == 6


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("sh", "-c", "echo 'ssh: connect to host b port 22: No route to host' >&2; exit 255"), "No route to host"),
        (("echo", "This account is not available."), "This account is not available."),
        (("yes",), "what came is not of an agent"),
        (("no-such-command-here",), "no-such-command-here cannot be started"),
    ],
)
def test_a_host_that_cannot_be_reached_is_named_with_its_own_words(command: tuple[str, ...], words: str) -> None:
    with (
        RemoteLauncher(
            [Site(name="b", connector=command, address="b")], lambda _: Placement(("b",), ("b",))
        ) as launcher,
        pytest.raises(LaunchError, match=f"host b: .*{words}"),
    ):
        launcher.wait_ready()
