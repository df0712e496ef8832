"""`fit()` on ssh hosts with a real sshd, one of which loses its agent."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import spotfit
from spotfit.ledger.journal import Journal
from spotfit.model.events import FailureCause
from spotfit.model.view import JournalView
from spotfit.store.factory import open_store
from spotfit.torch import TorchTrainer
from spotfit_localsim.live.reference_jobs import train_gradient_descent
from spotfit_provisioners.ssh.options import SshOptions
from tests.live.cloud import eventually
from tests.live.test_simulated_clouds import CONFIG, uninterrupted_result
from tests.ssh_hosts import SshHosts, requires_sshd, run_ssh_hosts


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    folder = tmp_path / "ssh"
    folder.mkdir()
    with run_ssh_hosts(folder, 2) as hosts:
        yield hosts


@requires_sshd
def test_lost_agent_of_a_host_does_not_change_the_result(hosts: SshHosts, tmp_path: Path) -> None:
    """The killed agent may be the leader; then the other one requests the replacement."""
    trainer = TorchTrainer(
        train_gradient_descent,
        train_loop_config=CONFIG,
        scaling_config=spotfit.ScalingConfig(num_workers=2),
        run_config=spotfit.RunConfig(storage_path=str(tmp_path / "runs"), name="run"),
        provisioner=SshOptions(
            hosts=hosts.names,
            config=str(hosts.config),
            python=sys.executable,
            state_dir=str(hosts.state_dir),
            grace_s=2.0,
        ),
    )

    def view() -> JournalView:
        return Journal(open_store(str(tmp_path / "runs" / "run"))).catch_up()

    def saved(step: int) -> bool:
        latest = view().latest_checkpoint
        return latest is not None and latest.metrics["step"] >= step

    handle = trainer.submit()
    eventually(lambda: saved(5))
    hosts.kill("h1")
    eventually(lambda: view().failure_counts.get(FailureCause.PREEMPTION))
    assert handle.result().return_value == uninterrupted_result()
    assert view().failure_counts == {FailureCause.PREEMPTION: 1}
    eventually(lambda: not hosts.processes())
