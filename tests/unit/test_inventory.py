"""hosts.yaml: what can be wrong in it, which host takes what, and how hosts are called."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from spes_core.config import ParallelConfig, RunConfig, ServerConfig, SyncConfig
from workbench.errors import StudyError
from workbench.hosts import describe
from workbench.launch.inventory import TEMPLATE, Host, Inventory, PlacementError, agent_site, connector, read_inventory
from workbench.launch.ports import host_and_port

GRADIENTS = replace(SyncConfig(), exchange="gradients")
COMMON = "ssh: x, work_dir: /w, python: python3"


def host(name: str, **settings: object) -> Host:
    return Host(**{"name": name, "ssh": name, "address": name, "work_dir": "w", "python": "python3", **settings})  # type: ignore[arg-type]


def run(nodes: int, **settings: object) -> RunConfig:
    return replace(RunConfig(), nodes=nodes, **settings)  # type: ignore[arg-type]


def mistakes(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "hosts.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(StudyError) as caught:
        read_inventory(path)
    return [mistake.removeprefix(f"{path}:") for mistake in caught.value.mistakes]


def test_the_inventory_that_the_documentation_shows_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "multi_host.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if block.startswith("hosts:")]
    path = tmp_path / "hosts.yaml"
    path.write_text(block, encoding="utf-8")
    inventory = read_inventory(path)
    assert [host.name for host in inventory.servers] == ["gpu1"]
    assert inventory.place(run(4)).nodes == ("gpu1", "gpu2", "gpu3", "gpu4")


def test_the_template_is_an_inventory(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(TEMPLATE, encoding="utf-8")
    inventory = read_inventory(path)
    assert [host.name for host in inventory.hosts] == ["a", "b"]
    assert [host.name for host in inventory.servers] == ["a"]


def test_all_mistakes_are_told_at_once_with_line_and_nearest_name(tmp_path: Path) -> None:
    text = (
        "hosts:\n"
        f"  - {{name: a, address: a, {COMMON}, gpu: 1}}\n"
        f"  - {{name: b, {COMMON}, nodes: many}}\n"
        "  - just-a-name\n"
        "host: 1\n"
    )
    assert sorted(mistakes(tmp_path, text)) == [
        '2: hosts[0].gpu is not a setting; did you mean "gpus"?',
        "3: hosts[1].address is missing",
        "3: hosts[1].nodes ('many') must be a whole number",
        "4: hosts[2] ('just-a-name') must be a mapping of settings",
        '5: host is not a setting; did you mean "hosts"?',
    ]


def test_rules_between_hosts_are_told_at_once(tmp_path: Path) -> None:
    text = (
        "hosts:\n"
        f"  - {{name: a, address: a, {COMMON}, server: true, nodes: -1}}\n"
        f"  - {{name: b, address: b, {COMMON}, server: true}}\n"
        "  - {name: a, address: c, ssh: -oProxyCommand=x, work_dir: /v, python: p}\n"
    )
    assert mistakes(tmp_path, text) == [
        "2: hosts[0].nodes (-1) must not be negative",
        "3: hosts[1].work_dir (/w) is the folder of a too; give each its own",
        "4: hosts[2].ssh (-oProxyCommand=x) must be a destination; options belong in ssh_options",
        "4: hosts[2].name (a) is that of hosts[0] too; give it another",
    ]


def test_addresses_and_folders_that_could_only_fail_later_are_refused(tmp_path: Path) -> None:
    refused = ["10.0.0.1:5200", "[::1]:22", "http://a", "a b", "höst", "fe80::1%eth0", "0.0.0.0", "[::]"]
    lines = [
        f"  - {{name: h{i}, address: '{one}', ssh: x, work_dir: /w{i}, python: p}}" for i, one in enumerate(refused)
    ]
    lines.append("  - {name: l, address: b, listen: '0.0.0.0:5200', ssh: x, work_dir: ~me/w, python: ~me/p}")
    found = mistakes(tmp_path, "\n".join(["hosts:", *lines, ""]))
    shown = [f"{i + 2}: hosts[{i}].address ({one}) " for i, one in enumerate(refused)]
    shown += [f"10: hosts[8].{name} (" for name in ("listen", "work_dir", "python")]
    assert [line[: len(start)] for line, start in zip(found, shown, strict=True)] == shown
    assert "must be a host name or an IP address, without a port" in found[0]
    assert "is none that others can call; it belongs in listen" in found[6]
    assert "must begin with / or ~/, or be relative to the home folder" in found[9]


def test_an_ipv6_address_is_written_with_brackets_or_without() -> None:
    for given in ("2001:db8::1", "[2001:db8::1]"):
        there = host("a", address=given, listen="[::]")
        assert list(there.problems("h")) == []
        site = agent_site(there, "/c")
        assert (site.address, site.listen) == ("2001:db8::1", "::")
    assert (host_and_port("2001:db8::1", 5), host_and_port("b", 5)) == ("[2001:db8::1]:5", "b:5")


def test_more_nodes_than_anyone_counts_cost_no_memory() -> None:
    assert Inventory((host("a", nodes=10**12),)).place(run(2)).nodes == ("a", "a")


def test_an_empty_file_and_an_empty_list_are_refused(tmp_path: Path) -> None:
    assert "hosts is missing" in mistakes(tmp_path, "")[0]
    assert "must list at least one host" in mistakes(tmp_path, "hosts: []\n")[0]


def test_nodes_fill_the_hosts_in_order() -> None:
    inventory = Inventory((host("a", nodes=2), host("b", nodes=0, server=True), host("c", nodes=2)))
    placement = inventory.place(run(3))
    assert (placement.servers, placement.nodes) == (("b",), ("a", "a", "c"))
    assert inventory.place(run(3)) == placement
    with pytest.raises(PlacementError, match=r"nodes \(5\) must be at most the 4"):
        inventory.place(run(5))


def test_servers_that_share_the_tensors_take_the_hosts_for_servers_in_turn() -> None:
    inventory = Inventory((host("a", nodes=2), host("b", server=True), host("c", nodes=0, server=True)))
    placement = inventory.place(run(2, server=ServerConfig(shards=3)))
    assert (placement.servers, placement.nodes) == (("b", "c", "b"), ("a", "a"))
    assert placement.hosts == ("b", "c", "a")
    assert [placement.host_of(f"server-{shard}-of-3") for shard in range(3)] == ["b", "c", "b"]
    assert describe({"t": placement}) == ["1 trials: servers: 2 on b, 1 on c; nodes 0, 1 on a"]
    assert inventory.place(run(2)).servers == ("b",)
    gradients = inventory.place(run(3, server=ServerConfig(shards=3), sync=GRADIENTS))
    assert gradients.hosts == ("a", "b"), "without rounds there is no server"


def test_ranks_that_exchange_gradients_fill_the_hosts_as_nodes_do() -> None:
    inventory = Inventory((host("a", nodes=2), host("b", server=True)))
    gradients = run(3, sync=GRADIENTS, parallel=replace(ParallelConfig(), ranks_per_node=2))
    placement = inventory.place(gradients)
    assert (placement.nodes, placement.spread) == (("a", "a", "a", "a", "b", "b"), (4, 2))
    assert placement.hosts == ("a", "b"), "rank 0's host comes first, wherever the server would be"
    assert [placement.host_of(f"torchrun-{rank}") for rank in (0, 4)] == ["a", "b"]
    assert placement.host_of("node-4") == "b"
    assert describe({"t": placement}) == ["1 trials: ranks 0, 1, 2, 3 on a; ranks 4, 5 on b"]
    whole = inventory.place(replace(gradients, nodes=2))
    assert (whole.hosts, whole.spread, whole.host_of("torchrun")) == (("a",), (), "a")
    with pytest.raises(PlacementError, match=r"nodes \(4\) must be at most the 3"):
        inventory.place(run(4, sync=GRADIENTS))


def test_without_a_server_only_hosts_of_nodes_take_part() -> None:
    inventory = Inventory((host("a"), host("b", server=True, nodes=0)))
    assert inventory.place(run(1, sync=replace(SyncConfig(), exchange="none"))).hosts == ("a",)
    assert inventory.place(run(1)).hosts == ("b", "a")


def test_ranks_of_a_node_need_their_gpus() -> None:
    two = run(2, parallel=replace(ParallelConfig(), ranks_per_node=2))
    assert Inventory((host("a"), host("b"))).place(two).nodes == ("a", "b")  # ranks on CPUs
    assert Inventory((host("a", gpus=2), host("b", gpus=2))).place(two).nodes == ("a", "b")
    with pytest.raises(PlacementError, match=r"host b has 1 GPUs .* for 2 ranks"):
        Inventory((host("a", gpus=2), host("b", gpus=1))).place(two)


def test_the_command_is_one_word_for_the_shell_of_the_host() -> None:
    argv = connector(host("a", ssh_options=("-p", "2222")), ("python3", "-c", "print('a b')", "$HOME"))
    assert argv[0] == "ssh" and "BatchMode=yes" in argv
    assert argv[1:3] == ("-p", "2222") and argv[-3:-1] == ("a", "--"), "the first of two options counts for ssh"
    assert shlex.split(argv[-1]) == ["python3", "-c", "print('a b')", "$HOME"]
    words = shlex.split(agent_site(host("a", work_dir="~/w ü", python="~/v/python"), "/c d").connector[-1])
    assert words == [
        "env",
        "PYTHONPATH=/c d",
        "PYTHONSAFEPATH=1",
        "v/python",
        "-m",
        "workbench.launch.agent",
        "--work",
        "w ü",
    ]
