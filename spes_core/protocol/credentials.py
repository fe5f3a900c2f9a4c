"""Who may take part: certificates and the join token of a run, made by one command, and where processes find theirs.

``python -m spes_core.server credentials DIR --nodes N --host NAME`` makes::

    DIR/ca.pem                     whom to trust: all processes
    DIR/server.pem  server.key     the server alone
    DIR/node-<n>.pem  node-<n>.key node n alone
    DIR/join.token                 all processes

The key of the authority itself is not kept: nobody can add a certificate later. A run on loopback needs none of this:
its server leaves a token of its own beside run.json, which only the same user can read.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_core.errors import ConfigError, Problem, Unreachable

TOKEN_FILE = "join.token"
_TOKEN_BYTES = 32
_VALID_DAYS = 365


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What one process shows and trusts."""

    token: str = ""
    """The run's join token; "" where there is none."""
    ca: bytes | None = None
    """Certificate (PEM) of the authority that the other side's must come from; None: no encryption."""
    certificate: bytes | None = None
    key: bytes | None = None

    @property
    def is_encrypted(self) -> bool:
        """Whether connections use mutual TLS."""
        return self.ca is not None

    def __repr__(self) -> str:
        return f"Credentials(encrypted={self.is_encrypted})"


OPEN = Credentials()
"""No credentials at all."""


def load(folder: Path, name: str | None) -> Credentials:
    """What the process ``name`` ("server", "node-3"; None: whichever is there) has in a credentials folder.

    Raises ConfigError that names the missing file.
    """
    if name is None:
        found = sorted(path.stem for path in folder.glob("*.key"))
        if not found:
            raise _wrong(f'("{folder}") has no certificate with its key; give the folder that `credentials` has made')
        name = found[0]
    try:
        shown = Credentials(
            token=(folder / TOKEN_FILE).read_text(encoding="ascii").strip(),
            ca=(folder / "ca.pem").read_bytes(),
            certificate=(folder / f"{name}.pem").read_bytes(),
            key=(folder / f"{name}.key").read_bytes(),
        )
    except (OSError, ValueError) as error:
        needed = f"{TOKEN_FILE}, ca.pem, {name}.pem and {name}.key"
        raise _wrong(f'("{folder}") must hold {needed} of one `credentials` command: {error}') from error
    if not shown.token:
        raise _wrong(f'("{folder}") has an empty {TOKEN_FILE}; copy it from where `credentials` has made it')
    check_certificate(folder, name, shown)
    return shown


def check_certificate(folder: Path, name: str, found: Credentials) -> None:
    """Raises ConfigError for what would only fail later, in words about ports and handshakes; ``folder`` (or a file)
    is where the process ``name`` has it from.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    assert found.ca is not None and found.certificate is not None and found.key is not None
    certificate_file, now = f"{name}.pem", datetime.datetime.now(datetime.UTC)
    try:
        authority = x509.load_pem_x509_certificate(found.ca)
        certificate = x509.load_pem_x509_certificate(found.certificate)
        key = load_pem_private_key(found.key, None)
    except (ValueError, TypeError) as error:
        message = f"has a ca.pem, {certificate_file} or {name}.key that is no certificate or key: {error}"
        raise _wrong(f'("{folder}") {message}') from error
    subjects = [item.value for item in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    if subjects != [name]:
        shown = ", ".join(f'"{one!s}"' for one in subjects)
        raise _wrong(f'("{folder}") has a {certificate_file} that is for {shown}, and not for "{name}"')
    if key.public_key() != certificate.public_key():
        raise _wrong(f'("{folder}") has a {name}.key that does not belong to {certificate_file}')
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise _wrong(f'("{folder}") has a {certificate_file} that is not of the authority in ca.pem') from error
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not first <= now <= last:
        raise _wrong(
            f'("{folder}") has a {certificate_file} that is valid from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M}'
            f" UTC, and by this machine's clock it is {now:%Y-%m-%d %H:%M}; set the clock if it is wrong, else have new"
            " ones made in a new folder"
        )


def missing_name(server: Credentials, host: str) -> str:
    """Why nodes that call the server ``host`` would not trust its certificate; "" when they would."""
    from cryptography import x509

    assert server.certificate is not None
    certificate = x509.load_pem_x509_certificate(server.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    known = [str(name.value) for name in names]
    return (
        "" if str(_general_name(host).value) in known else f"is not among the names of server.pem ({', '.join(known)})"
    )


def of_server(credentials: str | None, folder: Path) -> Credentials:
    """What a server of the run in ``folder`` shows; without certificates a token that the first one leaves there."""
    if credentials is not None:
        return load(Path(credentials), "server")
    path = folder / TOKEN_FILE
    token = _read_token(path)
    return Credentials(token=_leave_token(path) if token is None else token)


def of_node(credentials: str | None, folder: Path, node: int, timeout_s: float = 60.0) -> Credentials:
    """What node ``node`` of the run in ``folder`` shows. Raises ConfigError, or Unreachable when no server has left a
    token there within ``timeout_s``.
    """
    if credentials is not None:
        return load(Path(credentials), f"node-{node}")
    path, deadline_s = folder / TOKEN_FILE, time.monotonic() + timeout_s
    while (token := _read_token(path)) is None:
        if time.monotonic() > deadline_s:
            raise Unreachable(
                f"no server has left the run's join token in {path} within {timeout_s:g} s; see the server's log, or,"
                " where the server runs on another machine, copy the file from there"
            )
        time.sleep(0.02)
    return Credentials(token=token)


def make(folder: Path, nodes: int, hosts: Sequence[str]) -> list[Path]:
    """Make all credentials of a run in ``folder``; the files. Raises ConfigError rather than replace any."""
    from cryptography.hazmat.primitives.asymmetric import ec

    if nodes < 1:
        raise ConfigError([Problem("--nodes", f"({nodes}) must be at least 1")])
    names = ["server", *(f"node-{node}" for node in range(nodes))]
    files = ["ca.pem", TOKEN_FILE, *(f"{name}.{kind}" for name in names for kind in ("pem", "key"))]
    if there := [name for name in files if (folder / name).exists()]:
        message = f'("{folder}") has {there[0]} already, and a run may be using it; choose a new folder'
        raise ConfigError([Problem("DIR", message)])
    contents: dict[str, bytes] = {TOKEN_FILE: secrets.token_hex(_TOKEN_BYTES).encode() + b"\n"}
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _certificate("SPES run authority", authority_key, None, None, [])
    contents["ca.pem"] = _pem(authority)
    for name in names:
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = hosts if name == "server" else ()
        contents[f"{name}.pem"] = _pem(_certificate(name, key, authority, authority_key, alternatives))
        contents[f"{name}.key"] = _pem(key)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in files:
            write_private(folder / name, contents[name])
    except OSError as error:
        raise ConfigError([Problem("DIR", f'("{folder}") cannot be written: {error}')]) from error
    return [folder / name for name in files]


def main(arguments: Sequence[str]) -> int:
    """`python -m spes_core.server credentials`: its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m spes_core.server credentials", description="Make the certificates and the join token of a run."
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to make them in")
    parser.add_argument("--nodes", type=int, default=4, help="number of nodes (default: 4)")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="name or IP address by which nodes call the server; may be repeated (always included: localhost)",
    )
    options = parser.parse_args(arguments)
    try:
        make(options.folder, options.nodes, ["localhost", "127.0.0.1", "::1", *options.host])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    every = f"{options.folder}/ca.pem and {TOKEN_FILE}"
    print(f"server: {every}, server.pem, server.key")
    print(f"node n (0 to {options.nodes - 1}): {every}, node-n.pem, node-n.key; copy to it no other key")
    print(f'then set "credentials": "{options.folder}" in run.json; valid for {_VALID_DAYS} days')
    return 0


def _certificate(name: str, key: Any, issuer: Any, issuer_key: Any, hosts: Sequence[str]) -> Any:
    """An X.509 certificate for ``key``; without an issuer that of an authority, signed by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    is_authority = issuer is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if is_authority else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of machines differ.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
    )
    if not is_authority:
        usage = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), False)
    return builder.sign(key if is_authority else issuer_key, hashes.SHA256())


def _general_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError([Problem("--host", f'("{host}") is no host name or IP address: {error}')]) from error


def _pem(thing: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    if hasattr(thing, "public_bytes"):
        return bytes(thing.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    return bytes(thing.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))


def write_private(path: Path, content: bytes) -> None:
    """A new file that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _leave_token(path: Path) -> str:
    """Make a token, unless another server of the run has made one meanwhile; the one that lies there then."""
    token = secrets.token_hex(_TOKEN_BYTES)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    write_private(temporary, token.encode() + b"\n")
    try:
        os.link(temporary, path)
    except FileExistsError:
        if (others := _read_token(path)) is not None:
            temporary.unlink()
            return others
        temporary.replace(path)  # what lay there was no token
    except OSError:
        temporary.replace(path)  # a file system without links
    else:
        temporary.unlink()
    return token


def _read_token(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (FileNotFoundError, ValueError):
        return None
    return text if len(text) == 2 * _TOKEN_BYTES else None


def _wrong(message: str) -> ConfigError:
    return ConfigError([Problem("credentials", message)])
