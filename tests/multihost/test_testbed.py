"""The hosts of the testbed are what they claim to be: reached by ssh, slow when shaped, gone when cut off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.multihost import testbed
from tests.multihost.testbed import Testbed
from tests.processes.test_launch import is_gone, wait_until

pytestmark = [pytest.mark.multihost, pytest.mark.xdist_group("multihost")]
ROOT = Path(__file__).resolve().parents[2]


def addresses(hosts: Testbed, host: str) -> str:
    return hosts.ssh(host, "ip -br -4 addr show dev eth0").stdout


def test_ssh_reaches_each_host_at_its_own_address_and_hosts_reach_each_other(hosts: Testbed) -> None:
    assert len({hosts.address(host) for host in hosts.hosts}) == 4
    for host in hosts.hosts[:2]:
        assert hosts.address(host) in addresses(hosts, host)
    known = hosts.ssh_config.read_text()
    assert known.count("HostName") == 4
    through = subprocess.run(
        ["ssh", "host-2", "--", "echo", "by", "the", "wrapper"],
        env=hosts.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert through.stdout == "by the wrapper\n", through.stderr
    ping = f"timeout 10 bash -c 'exec 3<>/dev/tcp/{hosts.address('host-1')}/22 && head -c 4 <&3'"
    assert hosts.ssh("host-3", ping).stdout == "SSH-"


def seconds_to_fetch(hosts: Testbed, host: str, num_bytes: int) -> float:
    began_s = time.monotonic()
    done = hosts.ssh(host, f"head -c {num_bytes} /dev/zero | tr '\\0' x")
    assert len(done.stdout) == num_bytes
    return time.monotonic() - began_s


def test_a_shaped_link_slows_a_transfer_to_its_rate(hosts: Testbed) -> None:
    hosts.shape("host-0", 10)
    # 1.5 MB are 1.2 s at 10 Mbit/s; the shaper's burst takes a little from that, and a busy machine adds much.
    assert seconds_to_fetch(hosts, "host-0", 1_500_000) > 1.15
    hosts.shape("host-0", None)
    assert any(seconds_to_fetch(hosts, "host-0", 1_500_000) < 1.15 for _ in range(5))


def test_a_host_that_is_down_is_silent_and_one_that_is_up_again_goes_on(hosts: Testbed) -> None:
    counting = subprocess.Popen(
        ["ssh", "-F", str(hosts.ssh_config), "host-1", "--", "for i in 1 2 3; do echo $i; sleep 0.3; done"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert counting.stdout is not None and counting.stdout.readline() == "1\n"
    hosts.down("host-1")
    assert hosts.processes("host-1") != []
    refused = subprocess.run(
        ["ssh", "-F", str(hosts.ssh_config), "-o", "ConnectTimeout=1", "host-1", "true"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 255 and "Connection timed out" in refused.stderr, refused.stderr
    assert counting.poll() is None
    hosts.up("host-1")
    assert counting.communicate(timeout=60)[0] == "2\n3\n" and counting.returncode == 0


def test_a_host_that_crashes_loses_its_processes_and_can_be_booted_again(hosts: Testbed) -> None:
    sleeping = subprocess.Popen(["ssh", "-F", str(hosts.ssh_config), "host-2", "--", "sleep", "600"])
    wait_until(lambda: hosts.processes("host-2") != [])
    hosts.crash("host-2")
    assert hosts.processes("host-2") == []
    sleeping.kill()
    sleeping.wait()
    hosts.boot("host-2")
    assert hosts.address("host-2") in addresses(hosts, "host-2")


MAKE_AND_WAIT = """
import sys, time
from pathlib import Path
from tests.multihost.testbed import testbed
with testbed(1, Path(sys.argv[1])) as hosts:
    hosts.ssh("host-0", "setsid sleep 600 >/dev/null 2>&1 </dev/null &")
    print(hosts.namespace("host-0"), hosts.own_address, *hosts.processes("host-0"), flush=True)
    time.sleep(600)
"""


def test_what_a_killed_test_leaves_is_removed_by_the_next(hosts: Testbed, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKE_AND_WAIT, str(tmp_path / "killed")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    namespace, own_address, *pids = process.stdout.readline().split()
    assert pids and own_address != hosts.own_address
    testbed.remove_leftovers()
    assert namespace in testbed._namespaces()  # it lives
    process.send_signal(signal.SIGKILL)
    process.wait()
    testbed.remove_leftovers()
    assert not any(name.startswith(namespace.rpartition("-host")[0]) for name in testbed._namespaces())
    wait_until(lambda: all(is_gone(int(pid)) for pid in pids))
    assert own_address not in testbed._run("ip", "addr")
    assert hosts.address("host-0") in addresses(hosts, "host-0")  # other testbeds stay


def test_the_reason_is_said_where_there_can_be_no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    testbed.reason_not_possible.cache_clear()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert testbed.reason_not_possible() == "hosts as network namespaces need root on Linux"
    monkeypatch.undo()
    testbed.reason_not_possible.cache_clear()
    monkeypatch.setattr(testbed, "_PATH", "/nowhere")
    if testbed.reason_not_possible() != "hosts as network namespaces need root on Linux":
        assert "need ip, tc, ssh, sshd, ssh-keygen, setpriv (packages iproute2" in testbed.reason_not_possible()
    testbed.reason_not_possible.cache_clear()
