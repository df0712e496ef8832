"""Simulated clouds that grant two of three machines: both are released and all requested again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import spotfit
from spotfit.client import fit as client_fit
from spotfit.model.events import GroupWaiting, NodeLost
from spotfit_localsim.clouds.provisioner import SimProvisioner
from tests.live.cloud import events_of, eventually

REASONS = {"aws_batch": "INSUFFICIENT_INSTANCE_CAPACITY", "kubernetes": "Insufficient cpu"}

pytestmark = pytest.mark.real_time("machines are released after seconds")


def count_ranks() -> int:
    ranks = spotfit.collective.broadcast_from_rank_zero([0, 1, 2])
    return len(ranks)


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Release a partial capacity after seconds instead of 15 minutes."""
    chosen = client_fit._choose_timings

    def choose(*arguments: Any) -> Any:
        timing = chosen(*arguments)
        return replace(timing, partial_capacity_timeout_s=3.0, partial_capacity_pause_s=2.0)

    monkeypatch.setattr(client_fit, "_choose_timings", choose)


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize("name", sorted(REASONS))
def test_two_of_three_machines_are_released_and_requested_again(tmp_path: Path, name: str) -> None:
    sim = SimProvisioner.with_options(cloud=name, root=str(tmp_path / "cloud"), boot_s=0.1)
    sim.start_simulator()
    try:
        sim.call_simulator("capacity", {"machines": 2})
        handle = spotfit.DataParallelTrainer(
            count_ranks,
            scaling_config=spotfit.ScalingConfig(num_workers=3),
            run_config=spotfit.RunConfig(storage_path=str(tmp_path / "runs"), name="run"),
            provisioner=f"sim://{name}?root={sim.root}",
        ).submit()
        url = f"{tmp_path}/runs/run"

        def released() -> list[NodeLost]:
            lost = [event for event in events_of(url) if isinstance(event, NodeLost)]
            return [event for event in lost if event.is_unused]

        assert "machines for 2 of at least 3 workers" in eventually(released)[0].reason
        waiting = [event for event in events_of(url) if isinstance(event, GroupWaiting)]
        assert any(REASONS[name] in event.reason for event in waiting)
        sim.call_simulator("capacity", {"machines": None})
        assert handle.result(120.0).return_value == 3
        eventually(lambda: all(m["state"] == "over" for m in sim.call_simulator("machines")))
    finally:
        sim.call_simulator("leave", {"machines": True})
