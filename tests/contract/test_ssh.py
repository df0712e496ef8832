"""The ssh backend against the conformance suite, with a real sshd on loopback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.provision.api import Provisioner
from spotfit.testing.provisioner_suite import FaultInjectingCloud, ProvisionerSuite
from spotfit_provisioners.ssh.provisioner import SshProvisioner
from tests.ssh_hosts import SshHosts, requires_sshd, run_ssh_hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with run_ssh_hosts(tmp_path_factory.mktemp("ssh"), 4) as hosts:
        yield hosts


class SshFaultInjector:
    """Fault injection of hosts: closed hosts and killed agents."""

    def __init__(self, hosts: SshHosts, folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder

    def inject_fault(self, kind: str, times: int) -> None:
        if kind != "capacity":
            pytest.skip("see tests/unit/provisioners/ssh/test_client.py")
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in self._hosts.names:
            closed = self._folder / f"{name}.closed"
            closed.touch() if times else closed.unlink()

    def reclaim_newest(self) -> None:
        self._hosts.kill(below=self._folder)


@requires_sshd
class TestSsh(ProvisionerSuite):
    @pytest.fixture
    def folder(self, hosts: SshHosts, tmp_path: Path) -> Path:
        return hosts.state_dir / tmp_path.name

    @pytest.fixture
    def provisioner(self, hosts: SshHosts, folder: Path) -> Provisioner:
        return SshProvisioner.with_options(
            hosts=hosts.names,
            config=str(hosts.config),
            workers_per_node=2,
            python=sys.executable,
            state_dir=str(folder),
            grace_s=1.0,
        )

    @pytest.fixture
    def cloud(self, hosts: SshHosts, folder: Path) -> FaultInjectingCloud:
        return SshFaultInjector(hosts, folder)
