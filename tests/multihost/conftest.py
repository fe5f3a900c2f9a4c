"""Hosts for the tests of this folder, or the printed reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multihost.testbed import Testbed, reason_not_possible, testbed


@pytest.fixture(scope="session")
def four_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    """Four hosts with sshd, as fast as this machine."""
    if reason := reason_not_possible():
        print(f"skipped: {reason}")
        pytest.skip(reason)
    with testbed(4, tmp_path_factory.mktemp("four hosts")) as hosts:
        yield hosts


@pytest.fixture
def hosts(four_hosts: Testbed) -> Iterator[Testbed]:
    """The four hosts, whose links are whole and unshaped again after each test."""
    yield four_hosts
    for host in four_hosts.hosts:
        four_hosts.shape(host, None)
        four_hosts.up(host)
        if not four_hosts.is_quiet(host):  # a test that failed has left it so
            four_hosts.crash(host)
            four_hosts.boot(host)
