"""A Slurm cluster for SkyPilot: real daemons and ssh on this computer.

SkyPilot's Slurm cloud logs in by ssh and writes to the home directory of that user. Therefore
everything runs in a mount and a network namespace, in which the home directory is a copy and no
other host is reachable. Two parts are substituted: a page at the internet address of SkyPilot's
connectivity probe, and a `uv` that provides the Python of the test on machines instead of
downloading one.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import pwd
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests import slurm_cluster, ssh_hosts
from tests.slurm_cluster import SlurmCluster

_NAME = "lab"
INFRA = f"slurm/{_NAME}"
"""The name of the cluster in SkyPilot."""

_INTERNET_ADDRESS = "8.8.8.8"
"""The address of the connectivity probe of SkyPilot's jobs controllers, which ignore jobs without a
connection. Slurm also needs an address other than 127.0.0.1 to resolve its own name."""


_CLONE_FS, _CLONE_NEWNS, _CLONE_NEWNET = 0x00000200, 0x00020000, 0x40000000
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_LIBC = ctypes.CDLL(None, use_errno=True)


def _has_capabilities(*capabilities: int) -> bool:
    """Whether this process has these Linux capabilities."""
    status = Path("/proc/self/status").read_text()
    [held] = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return all(int(held, 16) >> one & 1 for one in capabilities)


requires_namespaces = pytest.mark.skipif(
    not _has_capabilities(_CAP_NET_ADMIN, _CAP_SYS_ADMIN),
    reason="only root may have a mount and a network namespace of its own",
)


@contextlib.contextmanager
def private_namespaces() -> Iterator[None]:
    """Enter a mount and a network namespace, for this thread and its child processes."""
    namespaces = Path("/proc/thread-self/ns")
    with (namespaces / "mnt").open() as mounts, (namespaces / "net").open() as network:
        _check_libc_call(_LIBC.unshare, _CLONE_NEWNS | _CLONE_NEWNET)
        try:
            _run("mount", "--make-rprivate", "/")
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "address", "add", f"{_INTERNET_ADDRESS}/32", "dev", "lo")
            yield
        finally:
            # setns to a mount namespace fails while threads share file system attributes.
            _check_libc_call(_LIBC.unshare, _CLONE_FS)
            _check_libc_call(_LIBC.setns, network.fileno(), _CLONE_NEWNET)
            _check_libc_call(_LIBC.setns, mounts.fileno(), _CLONE_NEWNS)


def _check_libc_call(call: Any, *words: int) -> None:
    if call(*words) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextlib.contextmanager
def run_slurm_for_skypilot(folder: Path, nodes: int) -> Iterator[SlurmCluster]:
    """Run a cluster that a SkyPilot with its home in this folder finds."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(private_namespaces())
        stack.enter_context(_fake_internet(folder))
        login = stack.enter_context(_overlay_home(folder))
        stack.enter_context(_hosts_by_name(folder, nodes))
        stack.enter_context(_kill_leftovers(folder / "slurm"))
        cluster = stack.enter_context(slurm_cluster.run_slurm_cluster(folder / "slurm", nodes))
        _install_tools(folder, login)
        variables = {"SLURM_CONF": cluster.conf, "TMPDIR": _make_directory(folder / "tmp")}
        hosts = stack.enter_context(
            ssh_hosts.run_ssh_hosts(_make_directory(folder / "ssh"), 1, variables)
        )
        _write_login_config(hosts, folder / "home")
        yield cluster


def kill_job(cluster: SlurmCluster, job: str) -> None:
    """Kill the machine of a Slurm job at once, without notice."""
    _kill(f"SLURM_CONF={cluster.conf}", f"SLURM_JOB_ID={job}")
    cluster.run_command("scancel", "--signal=KILL", job)


def skypilot_config(folder: Path) -> str:
    """SkyPilot's configuration of the nodes: usable directories."""
    places = {"workdir": folder / "work", "tmpdir": folder / "tmp"}
    lines = "".join(f"      {name}: {path}\n" for name, path in places.items())
    return f"slurm:\n  cluster_configs:\n    {_NAME}:\n{lines}"


def _make_directory(folder: Path) -> Path:
    folder.mkdir()
    return folder


@contextlib.contextmanager
def _kill_leftovers(folder: Path) -> Iterator[None]:
    """Without cgroups Slurm's list of a job's processes lacks those whose parents have ended."""
    folder.mkdir()
    try:
        yield
    finally:
        _kill(f"SLURM_CONF={folder}/slurm.conf")


def _kill(*variables: str) -> None:
    """Return processes with these variables in their environment, and their descendants."""
    wanted = {variable.encode() for variable in variables}
    while pids_to_kill := [
        one for one in Path("/proc").glob("[0-9]*") if wanted <= _environment(one)
    ]:
        for process in pids_to_kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)


def _environment(process: Path) -> set[bytes]:
    try:
        return set((process / "environ").read_bytes().split(b"\0"))
    except OSError:
        return set()  # the process has ended


@contextlib.contextmanager
def _overlay_home(folder: Path) -> Iterator[Path]:
    """Mount a temporary copy of the home directory."""
    home, layer = Path(pwd.getpwnam(getpass.getuser()).pw_dir), _make_directory(folder / "layer")
    _run("mount", "-t", "tmpfs", "tmpfs", str(layer))
    up, work = _make_directory(layer / "up"), _make_directory(layer / "work")
    layers = f"lowerdir={home},upperdir={up},workdir={work}"
    _run("mount", "-t", "overlay", "overlay", "-o", layers, str(home))
    try:
        yield home
    finally:
        _run("umount", "--lazy", str(home))
        _run("umount", "--lazy", str(layer))


@contextlib.contextmanager
def _hosts_by_name(folder: Path, nodes: int) -> Iterator[None]:
    """SkyPilot resolves nodes by name."""
    names = (socket.gethostname(), "localhost", *(f"n{n}" for n in range(1, nodes + 1)))
    hosts = folder / "hosts"
    hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in names))
    _run("mount", "--bind", str(hosts), "/etc/hosts")
    try:
        yield
    finally:
        _run("umount", "--lazy", "/etc/hosts")


@contextlib.contextmanager
def _fake_internet(folder: Path) -> Iterator[None]:
    """Answers every request with an empty page."""
    key, certificate = folder / "internet.key", folder / "internet.crt"
    names = (
        "-subj",
        f"/CN={_INTERNET_ADDRESS}",
        "-addext",
        f"subjectAltName=IP:{_INTERNET_ADDRESS}",
    )
    made = ("-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate))
    _run("openssl", "req", "-x509", *made, *names)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer((_INTERNET_ADDRESS, 443), _EmptyPage)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(certificate))
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _EmptyPage(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(HTTPStatus.NO_CONTENT)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Suppress the access log."""


_UV = """\
#!/bin/sh
# Stands in for uv, which SkyPilot downloads on a machine to install itself there from PyPI, into a
# Python that uv downloads as well: here it finds itself in the Python of the test.
case "$1 $2" in
"venv --seed")
    {python} -m venv --without-pip "$3" &&
        echo {packages} >"$3/lib/{folder}/site-packages/it.pth" ;;
esac
"""
_CURL = """\
#!/bin/sh
# Stands in for the one download that SkyPilot makes on a machine: the installer of uv.
case "$*" in
*astral.sh/uv/install.sh*) echo 'mkdir -p "$UV_INSTALL_DIR" && cp {uv} "$UV_INSTALL_DIR/uv"' ;;
*) echo "nothing else is expected to be downloaded: $*" >&2; exit 1 ;;
esac
"""


def _install_tools(folder: Path, login: Path) -> None:
    """Install tools on the machines."""
    tools = _make_directory(folder / "tools")
    _write(
        tools / "uv",
        _UV.format(
            python=sys.executable,
            packages=sysconfig.get_path("purelib"),
            folder=Path(sysconfig.get_path("stdlib")).name,
        ),
    )
    _write(tools / "curl", _CURL.format(uv=tools / "uv"))
    (login / ".profile").write_text(f"export PATH={tools}:$PATH\n")
    (login / ".bashrc").write_text("")  # user startup files would slow down every command


def _write(path: Path, script: str) -> None:
    path.write_text(script)
    path.chmod(0o755)


def _write_login_config(hosts: ssh_hosts.SshHosts, home: Path) -> None:
    """Write the ssh configuration of the login node for SkyPilot."""
    result = _run("ssh", "-G", "-F", str(hosts.config), hosts.names[0]).splitlines()
    names = ("hostname", "port", "user", "identityfile")
    lines = (line for line in result if line.partition(" ")[0] in names)
    config = home / ".slurm/config"
    config.parent.mkdir(parents=True)
    config.write_text("\n  ".join((f"Host {_NAME}", *lines)) + "\n")


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
