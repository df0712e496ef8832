"""Machine sizes on simulated clouds with containers that are killed at their memory limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.core.errors import ConfigError, WorkerGroupError
from spotfit.ledger.journal import Journal
from spotfit.model.events import GroupPlanned
from spotfit.store.factory import open_store
from spotfit_localsim.clouds.provisioner import SimProvisioner

# What a process has allocated after its first CUDA call with NCCL:
# https://github.com/pytorch/pytorch/issues/106511
CUDA_MIB = 2271


def allocate(config: dict[str, Any]) -> None:
    kept = b"x" * (config["mib"] * 2**20)
    spotfit.report({"mib": len(kept) // 2**20, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")})


class Harness:
    """A simulated cloud with memory limits, and two machines on each instance."""

    def __init__(self, name: str, folder: Path) -> None:
        options = {"boot_s": 0.1, "memory_limits": True, "machines_per_instance": 2}
        self.sim = SimProvisioner.with_options(cloud=name, root=str(folder / "cloud"), **options)
        self.provisioner = f"sim://{name}?root={self.sim.root}"
        self.storage = folder / "runs"

    def fit(self, mib: int, **scaling: Any) -> spotfit.Result:
        return spotfit.DataParallelTrainer(
            allocate,
            train_loop_config={"mib": mib},
            scaling_config=spotfit.ScalingConfig(**scaling),
            run_config=spotfit.RunConfig(storage_path=str(self.storage), name="run"),
            provisioner=self.provisioner,
        ).fit()

    def requested_machines(self) -> int:
        journal = Journal(open_store(str(self.storage / "run")))
        planned: list[GroupPlanned] = []
        journal.on_entry = lambda _slot, _body, entry: (
            planned.append(entry.event) if isinstance(entry.event, GroupPlanned) else None
        )
        journal.catch_up()
        return sum(event.plan.num_nodes for event in planned)


@pytest.fixture(params=["aws_batch", "kubernetes"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(request.param, tmp_path)
    harness.sim.start_simulator()
    yield harness
    harness.sim.call_simulator("leave", {"machines": True})


def test_gpu_workers_without_cpus_and_memory_run(
    harness: Harness, capfd: pytest.CaptureFixture[str]
) -> None:
    """The usual line of Ray, with the memory that CUDA allocates."""
    result = harness.fit(CUDA_MIB, num_workers=2, use_gpu=True)
    assert result.metrics is not None
    assert (result.metrics["mib"], result.metrics["gpus"]) == (CUDA_MIB, "0")
    output = "".join(capfd.readouterr())
    assert "GiB memory" in output
    assert ", 1 GPU each" in output
    assert "share one instance (sim-000000): its preemption ends all of them at once" in output


def test_machine_that_exceeds_its_memory_ends_the_run_with_the_reason(harness: Harness) -> None:
    """Replacements would be killed as well, without end."""
    memory = {"CPU": 1, "memory": 800 * 2**20}
    with pytest.raises(WorkerGroupError, match="exceeded the memory limit") as raised:
        harness.fit(1500, num_workers=1, resources_per_worker=memory)
    text = str(raised.value)
    assert "OutOfMemoryError: Container killed" in text or "OOMKilled (exit code 137)" in text
    assert 'with "memory" in resources_per_worker' in text
    assert harness.requested_machines() == 1


def test_limit_below_the_memory_of_cuda_is_refused_before_a_machine_is_rented(
    harness: Harness,
) -> None:
    memory = {"GPU": 1, "memory": 2 * 2**30}
    with pytest.raises(ConfigError, match=r"memory limit of 2048 MiB: it needs at least 2816 MiB"):
        harness.fit(1, num_workers=1, use_gpu=True, resources_per_worker=memory)
    assert harness.sim.call_simulator("machines") == []
