"""Whether ranks of several hosts can reach each other: asked of two agents on this machine."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.multihost.test_remote import agent
from workbench.launch.checked import Checked
from workbench.launch.hostlink import HostLink
from workbench.launch.inventory import Host
from workbench.launch.ports import interface_of
from workbench.launch.reach import try_group

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the fork server ends its children with prctl"),
]


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, HostLink]]:
    folder = tmp_path_factory.mktemp("hosts")
    links = {name: HostLink(name, agent(folder / name), lambda *_: None, lambda _: None) for name in "ab"}
    yield links
    for link in links.values():
        link.close()


def problems(links: dict[str, HostLink], port: int, **addresses: str) -> list[str]:
    """Of hosts with these addresses, which share a group that meets at a port."""
    members = []
    for name, link in links.items():
        host = Host(name=name, ssh=name, address="127.0.0.1", work_dir="w", python="p")
        members.append(Checked(replace(host, address=addresses.get(name, host.address)), link=link))
    with ThreadPoolExecutor() as pool:
        try_group(pool, members, port)
    return [problem for member in members for problem in member.problems]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_hosts_that_reach_each_other_have_no_problem_and_their_ports_are_free_again(
    links: dict[str, HostLink],
) -> None:
    port = free_port()
    assert problems(links, port) == []
    with socket.create_server(("127.0.0.1", port)):
        (problem,) = problems(links, port)
    assert problem.startswith(f"host a: it cannot listen at 127.0.0.1:{port}: ")


def test_an_address_that_the_host_itself_has_not_is_named(links: dict[str, HostLink]) -> None:
    (problem,) = problems(links, 0, b="192.0.2.7")
    assert problem.startswith("host b: no network interface of it has 192.0.2.7, and ranks that exchange gradients")


def test_a_name_that_means_the_loopback_is_nothing_that_others_could_call() -> None:
    assert interface_of(["127.0.0.1"]) == ("lo", "127.0.0.1")
    assert interface_of(["nowhere.invalid", "127.0.0.1"]) == ("lo", "127.0.0.1")
    with pytest.raises(OSError, match=r"no network interface of it has localhost or 192\.0\.2\.7"):
        interface_of(["localhost", "192.0.2.7"])
