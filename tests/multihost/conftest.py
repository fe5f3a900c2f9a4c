"""Hosts for the tests of this folder, or the printed reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multihost.jobs import write_study
from tests.multihost.slurmd import Slurm, lacking, running_slurm
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


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A cluster of two nodes."""
    if reason := lacking():
        print(f"skipped: {reason}")
        pytest.skip(reason)
    with running_slurm() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def user_folder(tmp_path_factory: pytest.TempPathFactory, slurm: Slurm) -> Iterator[Path]:
    """The folder of a user of the cluster, whose environment this process has meanwhile."""
    folder = tmp_path_factory.mktemp("a user's folder")
    write_study(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**slurm.env, "XDG_CACHE_HOME": str(folder / "cache")}.items():
            patch.setenv(name, value)
        yield folder
