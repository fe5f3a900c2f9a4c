"""Who may take part: one command makes what is needed, and nobody without it gets in."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spes_core.address import read_address
from spes_core.errors import ConfigError, Refused, SpesError, Unreachable
from spes_core.protocol import channel, credentials, status
from spes_core.protocol.client import SyncClient
from spes_core.protocol.connect import connect
from spes_core.protocol.credentials import Credentials
from spes_core.protocol.servicer import SyncServicer, num_threads
from spes_core.runfile import RunFile
from spes_core.sync.messages import make_hello
from tests.fake_core import FakeCore
from tests.small_rounds import small_config, small_schema
from tests.unit.test_transport import RESULTS, SCHEMA, joined, upload

pytestmark = pytest.mark.processes
HOSTS = ["localhost", "127.0.0.1"]


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spes_core.server", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run's credentials, beside those of another run."""
    folder = tmp_path_factory.mktemp("credentials")
    for name in ("ours", "theirs"):
        credentials.make(folder / name, 2, HOSTS)
    return folder


@contextmanager
def serving(core: FakeCore, shown: Credentials) -> Iterator[str]:
    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(num_threads(2)), options=channel.OPTIONS)
    server.add_generic_rpc_handlers((SyncServicer(core, 4096, shown.token),))
    port = channel.bind(server, "127.0.0.1:0", shown)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@pytest.fixture(scope="module")
def secured(made: Path) -> Iterator[tuple[FakeCore, str]]:
    core = FakeCore(SCHEMA, RESULTS)
    with serving(core, credentials.load(made / "ours", "server")) as address:
        yield core, address


def test_one_command_makes_everything_for_this_user_alone_and_replaces_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    done = cli("credentials", str(folder), "--nodes", "2", "--host", "gpu1.example.org", "--host", "10.0.0.7")
    assert done.returncode == 0, done.stderr
    names = {"ca.pem", "join.token"} | {
        f"{name}.{kind}" for name in ("server", "node-0", "node-1") for kind in ("pem", "key")
    }
    assert {path.name for path in folder.iterdir()} == names
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert len(bytes.fromhex((folder / "join.token").read_text())) == 32
    assert "server.key" in done.stdout and "copy to it no other key" in done.stdout
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    again = cli("credentials", str(folder), "--nodes", "2")
    assert (
        again.returncode == 2 and "has ca.pem already, and a run may be using it; choose a new folder" in again.stderr
    )
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["DIR", "--nodes", "0"], "error: --nodes (0) must be at least 1"),
        (["DIR", "--host", "bäd"], 'error: --host ("bäd") is no host name or IP address'),
        (["/proc/none"], 'error: DIR ("/proc/none") cannot be written'),
    ],
)
def test_a_command_that_cannot_work_says_why_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    folder = tmp_path / "made"
    assert credentials.main([argument.replace("DIR", str(folder)) for argument in arguments]) == 2
    assert capsys.readouterr().err.startswith(line)
    assert not folder.exists()


def test_a_node_with_its_certificate_takes_part(made: Path, secured: tuple[FakeCore, str]) -> None:
    core, address = secured
    with joined(address, 1, credentials=credentials.load(made / "ours", "node-1")) as client:
        upload(client)
    assert core.hellos[-1].node == 1


def ours(made: Path, name: str = "node-0") -> Credentials:
    return credentials.load(made / "ours", name)


FOREIGN = [
    ("another run's node", lambda made: credentials.load(made / "theirs", "node-0"), "do not accept each other's"),
    (
        "foreign certificate",
        lambda made: replace(credentials.load(made / "theirs", "node-0"), ca=ours(made).ca, token=ours(made).token),
        "closes connections like this one when the caller has none, or one that is not of the same",
    ),
    ("no certificate", lambda made: replace(ours(made), certificate=None, key=None), "closes connections like this"),
    ("plaintext", lambda made: Credentials(token=ours(made).token), "closes connections like this one"),
    ("the server's certificate", lambda made: ours(made, "server"), "closes connections like this one"),
    (
        "another node's certificate",
        lambda made: ours(made, "node-1"),
        'a certificate for "node-1" cannot join as node 0',
    ),
    ("wrong token", lambda made: replace(ours(made), token="0" * 64), "it shows another run's join token"),
    ("no token", lambda made: replace(ours(made), token=""), "it shows no join token; the right one is in join.token"),
]


@pytest.mark.parametrize(("name", "make", "text"), FOREIGN, ids=[row[0] for row in FOREIGN])
def test_nobody_else_gets_in(made: Path, secured: tuple[FakeCore, str], name: str, make: object, text: str) -> None:
    core, address = secured
    joins, refusals = len(core.hellos), len(core.refusals)
    with pytest.raises((Unreachable, Refused), match=text):
        joined(address, credentials=make(made), connect_timeout_s=0.3)  # type: ignore[operator]
    assert len(core.hellos) == joins
    # Whom the handshake turns away never reaches the run; of the others the address is recorded, and no node blamed.
    assert all(node is None and "from ipv4:127.0.0.1:" in reason for node, reason in core.refusals[refusals:])


def test_a_certificate_speaks_for_its_own_node_alone(made: Path, secured: tuple[FakeCore, str]) -> None:
    core, address = secured
    client = joined(address, 0, credentials=ours(made))
    thief = joined(address, 1, credentials=ours(made, "node-1"))
    thief._node, thief._session = 0, client._session  # a stolen session is of no use
    with pytest.raises(Refused, match='a certificate for "node-1" cannot speak for node 0'):
        upload(thief)
    assert core.refusals[-1][0] is None


def test_a_server_is_trusted_only_under_the_names_in_its_certificate(tmp_path: Path) -> None:
    credentials.make(tmp_path / "made", 1, ["elsewhere.example.org"])
    shown = credentials.load(tmp_path / "made", "server")
    with serving(FakeCore(SCHEMA, RESULTS), shown) as address, pytest.raises(Unreachable, match="must name the host"):
        joined(address, credentials=credentials.load(tmp_path / "made", "node-0"), connect_timeout_s=5)


def test_plaintext_beyond_this_machine_is_refused_on_both_sides_unless_asked_for_by_name(tmp_path: Path) -> None:
    config = small_config()
    path = tmp_path / "run.json"
    RunFile(trial="t", config=config, data_dir=str(tmp_path), server_address="0.0.0.0:0").save(path)
    done = cli(str(path))
    text = '("0.0.0.0:0") leaves this machine, and the run has no certificates'
    assert (
        done.returncode == 2 and f"error: server_address {text}" in done.stderr and "--allow-plaintext" in done.stderr
    )
    assert sorted(item.name for item in tmp_path.iterdir()) == ["run.json"]
    with pytest.raises(ConfigError, match="leaves this machine, and the run has no certificates"):
        joined("192.0.2.7:5000")
    with pytest.raises(Unreachable, match=r"192\.0\.2\.7:5000"):
        joined("192.0.2.7:5000", allow_plaintext=True, connect_timeout_s=0.2)


@pytest.mark.parametrize("missing", ["join.token", "ca.pem", "node-0.pem", "node-0.key"])
def test_a_missing_file_is_named(made: Path, tmp_path: Path, missing: str) -> None:
    for path in (made / "ours").iterdir():
        if path.name != missing:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match=rf"must hold .* of one `credentials` command: .*{missing}"):
        credentials.load(tmp_path, "node-0")


@pytest.mark.parametrize(
    ("name", "content_of", "text"),
    [
        ("server.key", "node-0.key", "has a server.key that does not belong to server.pem"),
        ("server.key", "join.token", "that is no certificate or key"),
        ("ca.pem", "../theirs/ca.pem", "has a server.pem that is not of the authority in ca.pem"),
        ("join.token", None, "has an empty join.token"),
    ],
)
def test_files_that_do_not_belong_together_are_named(
    made: Path, tmp_path: Path, name: str, content_of: str | None, text: str
) -> None:
    shutil.copytree(made / "ours", tmp_path / "ours")
    (tmp_path / "ours" / name).write_bytes((made / "ours" / content_of).read_bytes() if content_of else b"")
    with pytest.raises(ConfigError, match=text):
        credentials.load(tmp_path / "ours", "server")


def test_an_expired_certificate_is_named_with_its_days(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_VALID_DAYS", -0.5)
    credentials.make(tmp_path / "old", 1, HOSTS)
    with pytest.raises(ConfigError, match=r"has a server\.pem that is valid from .* to .*, and by this"):
        credentials.load(tmp_path / "old", "server")


def test_servers_of_one_run_that_begin_at_the_same_time_agree_on_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds that there is none before any has left one."""
    barrier, read = threading.Barrier(4), credentials._read_token

    def all_at_once(path: Path) -> str | None:
        found = read(path)
        if found is None:
            barrier.wait(30)
        return found

    monkeypatch.setattr(credentials, "_read_token", all_at_once)
    monkeypatch.setattr(credentials.os, "getpid", threading.get_ident)  # temporary names, as those of processes
    with ThreadPoolExecutor(4) as pool:
        tokens = list(pool.map(lambda _: credentials.of_server(None, tmp_path).token, range(4)))
    assert set(tokens) == {(tmp_path / "join.token").read_text().strip()}


def test_on_loopback_the_server_leaves_a_token_that_only_its_user_can_read_and_keeps_it(tmp_path: Path) -> None:
    first = credentials.of_server(None, tmp_path)
    path = tmp_path / "join.token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(bytes.fromhex(first.token)) == 32
    assert credentials.of_server(None, tmp_path) == first == credentials.of_node(None, tmp_path, 0)
    path.write_text("torn")
    assert credentials.of_server(None, tmp_path) != first
    assert [found.name for found in tmp_path.iterdir()] == ["join.token"]
    path.unlink()
    with pytest.raises(Unreachable, match=r"no server has left the run's join token in .* copy the file from there"):
        credentials.of_node(None, tmp_path, 0, timeout_s=0.1)


def test_a_token_never_shows_when_credentials_are_printed() -> None:
    assert "secret" not in repr(Credentials(token="secret", ca=b"", key=b"secret"))


@contextmanager
def real_server(folder: Path, shown: str | None = None) -> Iterator[str]:
    run = RunFile(trial="t", config=small_config(), data_dir=str(folder), credentials=shown)
    run.save(folder / "run.json")
    command = [sys.executable, "-m", "spes_core.server", str(folder / "run.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield read_address("127.0.0.1:0", folder)
    finally:
        process.kill()
        process.communicate()


def test_a_real_run_with_certificates_serves_its_nodes_its_status_and_nobody_else(made: Path, tmp_path: Path) -> None:
    config = small_config()
    hello = make_hello(config, small_schema(config), 0)
    with real_server(tmp_path, str(made / "ours")) as address:
        run = RunFile.load(tmp_path / "run.json")
        with connect(run, tmp_path, 0)[0] as client:
            assert client.join(hello).round == 0
        with pytest.raises(SpesError):
            SyncClient(address, config, 0, connect_timeout_s=0.2).join(hello)
        done = cli("status", address, "--credentials", str(made / "ours"))
        assert done.returncode == 0, done.stderr
        assert "round" in done.stdout and "staleness_rounds" in done.stdout and "training" in done.stdout
        refused = cli("status", address)
        assert refused.returncode == 1 and f"error: no server answers at {address}" in refused.stderr


def test_whoever_can_read_run_json_alone_cannot_join_and_status_and_health_tell_how_the_run_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config()
    hello = make_hello(config, small_schema(config), 0)
    with real_server(tmp_path) as address:
        with pytest.raises(Refused, match="no join token"):
            SyncClient(address, config, 0).join(hello)
        with connect(RunFile.load(tmp_path / "run.json"), tmp_path, 0)[0] as client:
            client.join(hello)
        assert status.main([address, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["round"] == 0 and answer["rounds"] == 2 and answer["failure"] is None
        assert [row["state"] for row in answer["nodes"]] == ["training", "absent"]
        assert {row["staleness_rounds"] for row in answer["experts"]} == {0}
        assert answer["last_refusal"]["node"] is None and "no join token" in answer["last_refusal"]["reason"]
        with grpc.insecure_channel(address) as line:
            health = health_pb2_grpc.HealthStub(line).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert status.main([address]) == 1
    assert capsys.readouterr().err.startswith(f"error: no server answers at {address}")


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", "127.0.0.1:", ":5200"])
def test_status_says_what_an_address_is(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([address]) == 2
    assert capsys.readouterr().err.startswith(f'error: ADDR ("{address}") must be host:port')


def test_status_of_another_machine_asks_for_the_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["192.0.2.7:5000"]) == 2
    assert (
        "error: ADDR (\"192.0.2.7:5000\") is another machine's: name the run's --credentials" in capsys.readouterr().err
    )
