"""Ceph's S3 server (RADOS Gateway), if Debian's packages are installed.

A monitor, one in-memory object daemon and the gateway run as processes in one folder, without
systemd. `make rgw` runs the store suite on it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMANDS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw")
KEY, SECRET = "key", "secret"
_TIMEOUT_S = 240.0
_POLL_INTERVAL_S = 0.2

requires_ceph = pytest.mark.skipif(
    not all(map(shutil.which, (*COMMANDS, "radosgw-admin"))),
    reason="Ceph is not installed: apt-get install --no-install-recommends radosgw ceph-mon "
    "ceph-osd ceph-common",
)


class CephCluster:
    """A minimal cluster with a gateway."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._conf = folder / "ceph.conf"
        self._keyring = folder / "keyring"
        self._id, self._osd = str(uuid.uuid4()), str(uuid.uuid4())
        self._mon, self._port = _free_ports(2)
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """The URL of the gateway."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Wait until the gateway answers and accepts `KEY`."""
        for part in ("mon", "osd", "rgw", "run"):
            (self._folder / part).mkdir()
        self._conf.write_text(self._configuration())
        self._make_keys()
        monitors = str(self._folder / "monmap")
        address = ("--addv", "a", f"[v2:127.0.0.1:{self._mon}]")
        self._run_command("monmaptool", "--create", *address, "--fsid", self._id, monitors)
        arguments = ("-i", "a", "--monmap", monitors, "--keyring", str(self._keyring))
        self._run_command("ceph-mon", "--mkfs", *arguments)
        self._start_daemon("ceph-mon", "-f", "-i", "a")
        self._run_command("ceph", "osd", "new", self._osd)
        self._run_command("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", self._osd)
        self._run_command(
            "ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=here"
        )
        self._start_daemon("ceph-osd", "-f", "-i", "0")
        self._start_daemon("radosgw", "-f", "-n", "client.rgw")
        user_options = (
            "--uid=me",
            "--display-name=me",
            f"--access-key={KEY}",
            f"--secret-key={SECRET}",
        )
        self._run_command("radosgw-admin", "user", "create", *user_options)
        self._wait_for_gateway()

    def stop(self) -> None:
        """End the daemons; their data is lost."""
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _make_keys(self) -> None:
        capabilities = ("--cap", "mon", "allow *", "--cap", "osd", "allow *")
        begin: tuple[str, ...] = ("--create-keyring",)
        for name in ("mon.", "client.admin", "osd.0", "client.rgw"):
            arguments = (str(self._keyring), *begin, "--gen-key", "-n", name, *capabilities)
            self._run_command("ceph-authtool", *arguments)
            begin = ()

    def _run_command(self, command: str, *arguments: str) -> str:
        done = subprocess.run(
            (command, *self._conf_arguments(command), *arguments),
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command} {arguments}: {done.stderr}; see {self._folder}"
        return done.stdout

    def _start_daemon(self, command: str, *arguments: str) -> None:
        with (self._folder / f"{command}.out").open("ab") as out:
            self._daemons.append(
                subprocess.Popen(
                    (command, *self._conf_arguments(command), *arguments),
                    env=self._environment(),
                    stdout=out,
                    stderr=out,
                )
            )

    def _conf_arguments(self, command: str) -> tuple[str, ...]:
        """Two tools ignore the configuration file."""
        knows_none = command in ("ceph-authtool", "monmaptool")
        return () if knows_none else ("-c", str(self._conf))

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "CEPH_CONF": str(self._conf)}

    def _wait_for_gateway(self) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            with (
                contextlib.closing(connection),
                contextlib.suppress(OSError, http.client.HTTPException),
            ):
                connection.request("GET", "/")
                if connection.getresponse().status == 200:
                    return
            assert time.monotonic() < deadline, f"see {self._folder}"
            time.sleep(_POLL_INTERVAL_S)

    def _configuration(self) -> str:
        """One in-memory copy of all data, on loopback only."""
        folder = self._folder
        lines = (
            "[global]",
            f"fsid = {self._id}",
            "mon initial members = a",
            f"mon host = [v2:127.0.0.1:{self._mon}]",
            "public addr = 127.0.0.1",
            f"keyring = {self._keyring}",
            "auth allow insecure global id reclaim = false",
            "osd pool default size = 1",
            "osd pool default min size = 1",
            "osd pool default pg num = 4",
            "osd crush chooseleaf type = 0",
            "osd crush update on start = false",
            "mon allow pool size one = true",
            "mon max pg per osd = 1000",
            "mon data avail crit = 1",
            "osd objectstore = memstore",
            "memstore device bytes = 4294967296",
            f"mon data = {folder}/mon",
            f"osd data = {folder}/osd",
            f"rgw data = {folder}/rgw",
            f"rgw frontends = beast endpoint=127.0.0.1:{self._port}",
            f"run dir = {folder}/run",
            f"crash dir = {folder}/run",
            f"log file = {folder}/$name.log",
            f"admin socket = {folder}/run/$name.$pid.asok",
            f"pid file = {folder}/run/$name.pid",
        )
        return "\n".join(lines) + "\n"


@contextlib.contextmanager
def run_ceph_gateway(folder: Path) -> Iterator[str]:
    """Run the gateway; yields its address."""
    ceph = CephCluster(folder)
    try:
        ceph.start()
        yield ceph.url
    finally:
        ceph.stop()


def _free_ports(count: int) -> list[int]:
    """Return distinct free ports; all are bound at the same time."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
