"""Every provisioner against the conformance suite, through its real client on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfit.provision.api import Provisioner
from spotfit.testing.provisioner_suite import FaultInjectingCloud, ProvisionerSuite
from spotfit_localsim.clouds.options import CLOUDS
from spotfit_localsim.clouds.provisioner import SimProvisioner
from spotfit_provisioners.local.options import LocalOptions
from spotfit_provisioners.local.provisioner import LocalProvisioner


class TestLocal(ProvisionerSuite):
    @pytest.fixture
    def remembers_released_groups(self) -> bool:
        return False

    @pytest.fixture
    def provisioner(self, tmp_path: Path) -> Provisioner:
        return LocalProvisioner(LocalOptions(root=str(tmp_path / "machines"), nodes=2))


class SimulatedFaultInjector:
    """Fault injection of a simulated cloud for the suite."""

    def __init__(self, sim: SimProvisioner) -> None:
        self._sim = sim

    def inject_fault(self, kind: str, times: int) -> None:
        self._sim.call_simulator("trouble", {"kind": kind, "times": times})

    def reclaim_newest(self) -> None:
        self._sim.call_simulator("reclaim", {"notice": False})


WITHOUT_RELEASED_GROUPS = ("kubernetes",)
"""Kubernetes does not remember deleted Jobs."""


@pytest.mark.parametrize("name", sorted(CLOUDS))
class TestSimulated(ProvisionerSuite):
    @pytest.fixture
    def sim(self, name: str, tmp_path: Path) -> Iterator[SimProvisioner]:
        sim = SimProvisioner.with_options(cloud=name, root=str(tmp_path / "cloud"), boot_s=0.05)
        yield sim
        sim.call_simulator("leave", {"machines": True})

    @pytest.fixture
    def provisioner(self, sim: SimProvisioner) -> Provisioner:
        return sim

    @pytest.fixture
    def remembers_released_groups(self, name: str) -> bool:
        return name not in WITHOUT_RELEASED_GROUPS

    @pytest.fixture
    def cloud(self, sim: SimProvisioner) -> FaultInjectingCloud:
        return SimulatedFaultInjector(sim)
