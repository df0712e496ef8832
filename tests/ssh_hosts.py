"""Hosts for tests: one sshd on loopback with several host names, keys in one folder."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from spotfit_provisioners.ssh.render import MARKER_VARIABLE

_SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin")
_TIMEOUT_S = 30.0

requires_sshd = pytest.mark.skipif(
    _SSHD is None or shutil.which("ssh") is None,
    reason="OpenSSH's server is not installed; `.ci/servers` as root",
)


@dataclass(frozen=True)
class SshHosts:
    """Host names of this machine; clients treat each as a separate host."""

    config: Path
    """An ssh configuration. Its host 'down' does not answer; the key of 'unverified' is unknown."""
    names: tuple[str, ...]
    state_dir: Path
    """The folder of the hosts' state."""

    def processes(self, host: str = "", *, below: Path | None = None) -> list[int]:
        """Return the processes of agents of one host or of all."""
        begins, holds = (
            f"{MARKER_VARIABLE}={below or self.state_dir}/".encode(),
            f"/{host}/".encode(),
        )
        marks = ((pid, _find_variable(pid, begins)) for pid in _pids())
        return [pid for pid, mark in marks if mark and (not host or holds in mark)]

    def kill(self, host: str = "", *, below: Path | None = None) -> None:
        """Kill all these processes."""
        for pid in self.processes(host, below=below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def run_ssh_hosts(
    folder: Path, count: int, variables: Mapping[str, object] | None = None
) -> Iterator[SshHosts]:
    """Run `count` hosts with these environment variables for sessions; kills their processes at the
    end."""
    assert _SSHD is not None
    for key in ("host", "user"):
        command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        subprocess.run(command, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    names = tuple(f"h{number}" for number in range(1, count + 1))
    hosts = SshHosts(folder / "config", names, folder / "notes")
    settings = _write_configuration(folder, port, hosts, variables or {})
    Path("/run/sshd").mkdir(exist_ok=True)  # its privilege separation directory
    with (folder / "sshd.log").open("ab") as log:
        daemon = subprocess.Popen((_SSHD, "-D", "-e", "-f", str(settings)), stdout=log, stderr=log)
    try:
        _wait_for_port(port)
        yield hosts
    finally:
        daemon.terminate()
        daemon.wait()
        hosts.kill()


def _write_configuration(
    folder: Path, port: int, hosts: SshHosts, variables: Mapping[str, object]
) -> Path:
    shutil.copy(folder / "user.pub", folder / "authorized")
    key = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key}")
    hosts.config.write_text(
        f"Host {' '.join(hosts.names)} unverified\n  HostName 127.0.0.1\n  Port {port}\n"
        f"  User {getpass.getuser()}\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/known\n"
        "Host unverified\n  HostKeyAlias unverified\n"
        "Host down\n  HostName 127.0.0.1\n  Port 1\n"
    )
    settings = folder / "sshd_config"
    result = " ".join(f'"{name}={text}"' for name, text in variables.items())
    settings.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        "MaxStartups 100\nMaxSessions 100\n" + (f"SetEnv {result}\n" if result else "")
    )
    return settings


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208  # /proc


def _find_variable(pid: int, begins: bytes) -> bytes:
    """Return the environment variable of a process with this prefix; b'' if missing."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return b""
    return next((one for one in variables if one.startswith(begins)), b"")


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
