"""Machines that are lost more often than the cloud restarts them, without a driver."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.host import env
from spotfit.ledger.journal import Journal
from spotfit.model.events import FailureCause
from spotfit.model.view import JournalView
from spotfit.store.factory import open_store
from spotfit_localsim.clouds.provisioner import SimProvisioner
from spotfit_localsim.live.reference_jobs import expected_hash_chain
from tests.live.cloud import eventually

LAPTOP = """
    import json
    import sys
    import tempfile
    from pathlib import Path

    import spotfit
    from spotfit.host.system import SystemClock
    from spotfit_localsim.live.reference_jobs import expected_hash_chain


    def train(config):
        step = 0
        if saved := spotfit.get_checkpoint():
            with saved.as_directory() as folder:
                step = json.loads(Path(folder, "step").read_text())
        while not Path(config["enough"]).exists():
            step += 1
            SystemClock().wait(0.1)
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "step").write_text(json.dumps(step))
                kept = spotfit.Checkpoint.from_directory(folder)
                spotfit.report({"step": step}, checkpoint=kept)
        return {"step": step, "chain": expected_hash_chain(step)}


    if __name__ == "__main__":
        provisioner, storage, enough = sys.argv[1:]
        spotfit.DataParallelTrainer(
            train,
            train_loop_config={"enough": enough},
            scaling_config=spotfit.ScalingConfig(num_workers=1),
            run_config=spotfit.RunConfig(
                storage_path=storage,
                name="run",
                checkpoint_config=spotfit.CheckpointConfig(num_to_keep=2),
            ),
            provisioner=provisioner,
        ).fit()
"""


class DriverlessRun:
    """A run of one machine whose driver was killed."""

    def __init__(self, name: str, folder: Path) -> None:
        self.sim = SimProvisioner.with_options(
            cloud=name, root=str(folder / "cloud"), boot_s=0.1, idle_s=60.0
        )
        self.sim.start_simulator()
        self.storage, self.enough = folder / "runs", folder / "enough"
        self.lost: set[int] = set()
        self._script = folder / "laptop.py"
        self._script.write_text(textwrap.dedent(LAPTOP))

    def begin(self) -> None:
        """Start the run, and kill the driver once there is a checkpoint."""
        provisioner = f"sim://{self.sim.options.cloud}?root={self.sim.root}"
        laptop = subprocess.Popen(
            [sys.executable, str(self._script), provisioner, str(self.storage), str(self.enough)],
            env=env.copy_environment(),
        )
        try:
            eventually(lambda: self.saved_since(-1))
        finally:
            laptop.send_signal(signal.SIGKILL)
            laptop.wait()

    @cached_property
    def journal(self) -> Journal:
        return Journal(open_store(str(self.storage / "run")))

    @property
    def view(self) -> JournalView:
        return self.journal.catch_up()

    def saved_since(self, slot: int) -> bool:
        return self.view.latest_committed_slot > slot

    def machines_now(self) -> list[dict[str, Any]]:
        return [one for one in self.sim.call_simulator("machines") if one["state"] == "up"]

    def reclaim(self, times: int) -> None:
        """Preempt the machine without notice as soon as it exists."""
        for _ in range(times):
            (machine, *_) = eventually(lambda: self.machines_now())
            self.sim.call_simulator("reclaim", {"machine": machine["number"], "notice": False})

    def wait_for_checkpoint(self) -> None:
        """Wait for another checkpoint."""
        slot = self.view.next_slot
        eventually(lambda: self.saved_since(slot))

    def finish(self) -> dict[str, Any]:
        self.enough.touch()
        result = spotfit.attach(str(self.storage / "run")).result()
        output: dict[str, Any] = result.return_value
        return output


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[[str], DriverlessRun]]:
    started: list[DriverlessRun] = []

    def begin(name: str) -> DriverlessRun:
        started.append(DriverlessRun(name, tmp_path))
        started[-1].begin()
        return started[-1]

    yield begin
    for one in started:
        one.sim.call_simulator("leave", {"machines": True})


@pytest.mark.parametrize(("name", "max_attempts"), [("aws_batch", 10), ("gcp_batch", 11)])
def test_machine_on_its_last_attempt_is_replaced_before_it_is_lost(
    start_run: Callable[[str], DriverlessRun], name: str, max_attempts: int
) -> None:
    """AWS Batch starts a job ten times and Google a task eleven times; then the run would stop."""
    run = start_run(name)
    first = set(run.view.groups)
    run.reclaim(max_attempts - 2)
    run.wait_for_checkpoint()
    assert set(run.view.groups) == first, "Batch restarted the lost machine"
    run.reclaim(1)  # the last attempt begins
    eventually(lambda: {place.token for place in round_places(run.view)} - first)
    assert run.view.failure_counts.get(FailureCause.RESIZE), (
        "the machine was released after a commit"
    )
    eventually(lambda: len(run.machines_now()) == 1)
    run.wait_for_checkpoint()
    run.reclaim(1)
    run.wait_for_checkpoint()
    result = run.finish()
    assert result["chain"] == expected_hash_chain(result["step"])


@pytest.mark.parametrize(("name", "max_attempts"), [("aws_batch", 10)])
def test_attach_replaces_a_machine_without_attempts_left(
    start_run: Callable[[str], DriverlessRun], name: str, max_attempts: int
) -> None:
    run = start_run(name)
    first = set(run.view.groups)
    run.reclaim(max_attempts)
    eventually(lambda: not run.machines_now())
    result = run.finish()
    assert result["chain"] == expected_hash_chain(result["step"])
    assert set(run.view.groups) != first


@pytest.mark.parametrize("name", ["azure_batch", "kubernetes"])
def test_group_without_an_attempt_limit_is_restarted_indefinitely(
    start_run: Callable[[str], DriverlessRun], name: str
) -> None:
    """Preempted Azure tasks and disrupted pods are restarted without limit."""
    run = start_run(name)
    first = set(run.view.groups)
    run.reclaim(12)
    run.wait_for_checkpoint()
    assert set(run.view.groups) == first
    result = run.finish()
    assert result["chain"] == expected_hash_chain(result["step"])


def round_places(view: JournalView) -> tuple[Any, ...]:
    return view.round.assignments if view.round is not None else ()
