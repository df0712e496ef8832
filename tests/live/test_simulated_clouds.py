"""`fit()` on every simulated cloud through its real client, with preemptions and errors."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.core.errors import TrainingFailedError
from spotfit.host import env
from spotfit.ledger.journal import Journal
from spotfit.model.events import FailureCause
from spotfit.model.view import JournalView
from spotfit.store.factory import open_store
from spotfit.torch import TorchTrainer
from spotfit_localsim.clouds.options import CLOUDS
from spotfit_localsim.clouds.provisioner import SimProvisioner
from spotfit_localsim.live.reference_jobs import (
    expected_hash_chain,
    train_gradient_descent,
    train_hash_chain,
)
from tests.live.cloud import eventually

CONFIG: dict[str, Any] = {"steps": 120, "save_every": 5, "step_s": 0.03}
RESULT = expected_hash_chain(CONFIG["steps"])

pytestmark = pytest.mark.parametrize("name", sorted(CLOUDS))


@cache
def uninterrupted_result(steps: int = CONFIG["steps"]) -> str:
    """Return the result of an uninterrupted run of two ranks."""
    import torch

    weights = torch.linspace(-1.0, 1.0, 64)
    for step in range(1, steps + 1):
        gradient = torch.sin(weights * step) + torch.sin(weights * step + 1)
        weights = weights - 0.05 * gradient
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


class CloudHarness:
    """A simulated cloud and a bucket."""

    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        usual = {"cloud": name, "root": str(folder / "cloud"), "idle_s": 60.0}
        usual |= {"boot_s": 0.1, "notice_s": 4.0}
        self.sim = SimProvisioner.with_options(**usual | options)
        self.provisioner = f"sim://{name}?root={self.sim.root}"
        self.storage = folder / "runs"

    def trainer(self, *, with_torch: bool = False) -> spotfit.DataParallelTrainer:
        """Two workers on two machines. Every machine would import torch, which takes seconds."""
        trainer_type = TorchTrainer if with_torch else spotfit.DataParallelTrainer
        return trainer_type(
            train_gradient_descent if with_torch else train_hash_chain,
            train_loop_config=CONFIG,
            scaling_config=spotfit.ScalingConfig(num_workers=2),
            run_config=spotfit.RunConfig(storage_path=str(self.storage), name="run"),
            provisioner=self.provisioner,
        )

    @cached_property
    def journal(self) -> Journal:
        return Journal(open_store(str(self.storage / "run")))

    @property
    def view(self) -> JournalView:
        return self.journal.catch_up()

    def saved(self, step: int) -> bool:
        latest = self.view.latest_checkpoint
        return latest is not None and latest.metrics["step"] >= step

    def running_machine(self) -> int:
        """Return a machine of the round; the cloud may have restarted a replaced one."""
        round_ = eventually(lambda: self.view.round)
        assert round_ is not None
        hosts = {place.host for place in round_.assignments}
        up = [one for one in self.sim.call_simulator("machines") if one["state"] == "up"]
        return next(int(one["number"]) for one in up if one["address"] in hosts)

    def is_refused(self) -> bool:
        """Return whether the cloud or a waiting group reports missing capacity."""
        groups = self.view.groups.values()
        handles = [group.handle for group in groups if group.handle is not None]
        return bool(self.view.refusals) or any(self.sim.observe(one).refusal for one in handles)

    def no_machine_exists(self) -> bool:
        return all(machine["state"] == "over" for machine in self.sim.call_simulator("machines"))


@pytest.fixture
def harness(name: str, tmp_path: Path) -> Iterator[CloudHarness]:
    harness = CloudHarness(name, tmp_path)
    harness.sim.start_simulator()
    yield harness
    harness.sim.call_simulator("leave", {"machines": True})


def test_preemptions_with_and_without_notice_do_not_change_the_result(
    harness: CloudHarness,
) -> None:
    handle = harness.trainer(with_torch=True).submit()
    eventually(lambda: harness.saved(5))
    harness.sim.call_simulator("reclaim", {"notice": True})
    eventually(lambda: harness.view.failure_counts.get(FailureCause.PREEMPTION))
    eventually(lambda: harness.saved(60))
    harness.sim.call_simulator("reclaim", {"notice": False, "machine": harness.running_machine()})
    assert handle.result().return_value == uninterrupted_result()
    assert harness.view.failure_counts == {FailureCause.PREEMPTION: 2}
    eventually(harness.no_machine_exists)


@pytest.mark.parametrize(
    ("notice", "options"),
    [
        pytest.param(False, {}, id="no notice"),
        # Long, so that the machine leaves in time on a loaded computer.
        pytest.param(True, {"notice_s": 30.0}, id="notice", marks=pytest.mark.slow),
        pytest.param(False, {"lag_s": 3.0}, id="late reads", marks=pytest.mark.slow),
    ],
)
def test_one_loss_rents_one_machine(
    name: str, tmp_path: Path, options: dict[str, Any], *, notice: bool
) -> None:
    """Neither the restart by the backend nor a read that lags rents a further machine."""
    harness = CloudHarness(name, tmp_path, **options)
    harness.sim.start_simulator()
    try:
        handle = harness.trainer().submit()
        eventually(lambda: harness.saved(5))
        lost = harness.running_machine()
        harness.sim.call_simulator("reclaim", {"notice": notice, "machine": lost})
        assert handle.result().return_value == RESULT
        assert len(harness.sim.call_simulator("machines")) == 3
        eventually(harness.no_machine_exists)
    finally:
        harness.sim.call_simulator("leave", {"machines": True})


def test_restarted_simulator_restores_its_machines(harness: CloudHarness) -> None:
    handle = harness.trainer().submit()
    eventually(lambda: harness.saved(5))
    harness.sim.call_simulator("leave", {"machines": False})
    eventually(lambda: harness.saved(60))
    harness.sim.call_simulator("reclaim", {"notice": False})
    assert handle.result().return_value == RESULT
    assert harness.view.failure_counts == {FailureCause.PREEMPTION: 1}
    eventually(harness.no_machine_exists)


def test_run_waits_for_simulated_capacity(harness: CloudHarness) -> None:
    harness.sim.call_simulator("trouble", {"kind": "capacity", "times": 1_000_000})
    handle = harness.trainer().submit()
    eventually(harness.is_refused)
    assert not harness.sim.call_simulator("machines")
    harness.sim.call_simulator("trouble", {"kind": "capacity", "times": 0})
    assert handle.result().return_value == RESULT


def test_a_run_with_too_few_machines_shows_the_reason_of_the_cloud(
    harness: CloudHarness, name: str
) -> None:
    if name == "plain":
        pytest.skip("this cloud gives no reason")
    harness.sim.call_simulator("capacity", {"machines": 1})
    handle = harness.trainer().submit()
    reason = eventually(lambda: harness.view.waiting_reason)
    assert any(words in reason for words in _CAPACITY_REASONS), reason
    harness.sim.call_simulator("capacity", {"machines": None})
    assert handle.result().return_value == RESULT


_CAPACITY_REASONS = (
    "INSUFFICIENT_INSTANCE_CAPACITY",
    "ZONE_RESOURCE_POOL_EXHAUSTED",
    "AllocationFailed",
    "Insufficient cpu",
)


_WITHOUT_RESTARTS = {"aws_batch": "&attempts=1", "gcp_batch": "&max_retries=0"}
"""Options with which the run, and not the cloud, replaces a lost machine."""


@pytest.mark.timeout(240)
def test_invalid_credentials_during_a_replacement_do_not_change_the_result(
    harness: CloudHarness, name: str
) -> None:
    harness.provisioner += _WITHOUT_RESTARTS.get(name, "")
    handle = harness.trainer().submit()
    eventually(lambda: harness.saved(5))
    fault = {"kind": "credentials", "duration_s": 30.0 if name == "aws_batch" else 8.0}
    harness.sim.call_simulator("trouble", fault)
    harness.sim.call_simulator("reclaim", {"notice": False, "machine": harness.running_machine()})
    assert handle.result().return_value == RESULT
    eventually(harness.no_machine_exists)


@pytest.mark.parametrize("kind", ["quota", "permission", "credentials"])
def test_permanent_error_ends_the_run_with_its_reason(harness: CloudHarness, kind: str) -> None:
    harness.sim.call_simulator("trouble", {"kind": kind, "times": 1_000_000})
    with pytest.raises(TrainingFailedError) as error_info:
        harness.trainer().fit()
    assert len(str(error_info.value)) > 40
    assert harness.view.fit_end is not None
    assert not harness.sim.call_simulator("machines")


LAPTOP = """
    import sys
    from pathlib import Path
    from tests.live.test_simulated_clouds import CloudHarness

    if __name__ == "__main__":
                CloudHarness(sys.argv[1], Path(sys.argv[2])).trainer().fit()
"""


def test_another_client_gets_the_result_after_the_driver_is_killed(
    harness: CloudHarness, name: str, tmp_path: Path
) -> None:
    script = tmp_path / "laptop.py"
    script.write_text(textwrap.dedent(LAPTOP))
    laptop = subprocess.Popen(
        [sys.executable, str(script), name, str(tmp_path)],
        env=env.copy_environment() | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        eventually(lambda: harness.saved(5))
    finally:
        laptop.send_signal(signal.SIGKILL)
        laptop.wait()
    harness.sim.call_simulator("reclaim", {"notice": False})
    handle = spotfit.attach(str(tmp_path / "runs" / "run"))
    assert handle.result().return_value == RESULT
    eventually(harness.no_machine_exists)
