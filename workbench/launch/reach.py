"""Whether hosts reach each other where the processes of a run will: at a port of one of them, or each at each other."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from workbench.launch.checked import Checked, each
from workbench.launch.launcher import LaunchError
from workbench.launch.ports import host_and_port

_CALL_S = 5.0
_LISTEN_S = 60.0


def try_server(pool: ThreadPoolExecutor, server: Checked, there: Sequence[Checked], port: int) -> None:
    """Whether every host reaches a server, or the first rank of a group, that listens where ours will."""
    assert server.link is not None
    host, listen = server.host, server.host.listens_at
    try:
        tried = _listen(server, listen, port)
    except LaunchError as error:
        where = host_and_port(listen, port) if port else listen
        unheard = f"it cannot listen at {where}: {_why(error)}; mend address or listen, or name another port"
        server.blame(str(error) if server.link.lost else unheard)
        return
    _call(pool, there, server, host.reached_at, tried, "open the port")
    _hush([server])


def try_group(pool: ThreadPoolExecutor, members: Sequence[Checked], port: int) -> None:
    """Whether hosts that share a group reach the first one's ``port``, and each other at ports that nobody chooses."""
    addresses: dict[str, str] = {}

    def look(one: Checked) -> None:
        assert one.link is not None
        known = [one.host.reached_at, one.host.listens_at]
        try:
            addresses[one.host.name] = one.link.ask("interface", addresses=known)["address"]
        except LaunchError as error:
            one.blame(
                f"{_why(error)}, and ranks that exchange gradients are reached at nothing else; name an address of its"
                " own (one behind NAT cannot take part)"
            )

    each(pool, members, look)
    if len(addresses) < len(members):
        return
    try_server(pool, members[0], members, port)
    for one in members:
        try:
            tried = _listen(one, addresses[one.host.name], 0)
        except LaunchError as error:
            one.blame(_why(error))
            continue
        others = [other for other in members if other is not one]
        _call(pool, others, one, addresses[one.host.name], tried, "ranks that exchange gradients need all ports")
    _hush(members)


def _listen(one: Checked, address: str, port: int) -> tuple[int, str]:
    """(port, what a caller must know) of an agent that answers calls from now on. Raises LaunchError."""
    assert one.link is not None
    port, nonce = port or int(one.link.ask("free_port", address=address)["port"]), secrets.token_hex(16)
    one.link.ask("listen", address=address, port=port, nonce=nonce, seconds=_LISTEN_S)
    return port, nonce


def _call(
    pool: ThreadPoolExecutor,
    callers: Sequence[Checked],
    called: Checked,
    address: str,
    tried: tuple[int, str],
    advice: str,
) -> None:
    port, nonce = tried

    def call(one: Checked) -> None:
        assert one.link is not None
        try:
            one.link.ask("call", address=address, port=port, nonce=nonce, seconds=_CALL_S)
        except LaunchError as error:
            unreached = f"host {called.host.name} cannot be reached from it: {_why(error)}; {advice}"
            one.blame(str(error) if one.link.lost else unreached)

    each(pool, callers, call)


def _hush(listening: Sequence[Checked]) -> None:
    """The ports are wanted by what was tried for."""
    for one in listening:
        assert one.link is not None
        try:
            one.link.ask("hush")
        except LaunchError as error:
            one.blame(str(error))


def _why(error: LaunchError) -> str:
    """Without the name of the host, which `Checked.blame` gives."""
    return str(error).partition(": ")[2]
