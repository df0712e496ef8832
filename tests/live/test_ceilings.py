"""Machines that are taken away more often than a cloud brings them back, and nobody else awake."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
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


class Alone:
    """A run of one machine whose laptop is gone."""

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
        """Start the run, and kill whoever started it once it has a checkpoint."""
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

    @property
    def view(self) -> JournalView:
        return Journal(open_store(str(self.storage / "run"))).catch_up()

    def saved_since(self, slot: int) -> bool:
        return self.view.latest_committed_slot > slot

    def standing(self) -> list[dict[str, Any]]:
        return [one for one in self.sim.call_simulator("machines") if one["state"] == "up"]

    def lose(self, times: int) -> None:
        """The one machine there is, as soon as there is one, without a word."""
        for _ in range(times):
            (machine, *_) = eventually(lambda: self.standing())
            self.sim.call_simulator("reclaim", {"machine": machine["number"], "notice": False})

    def goes_on(self) -> None:
        """It has saved something more."""
        slot = self.view.next_slot
        eventually(lambda: self.saved_since(slot))

    def finish(self) -> dict[str, Any]:
        self.enough.touch()
        result = spotfit.attach(str(self.storage / "run")).result()
        told: dict[str, Any] = result.return_value
        return told


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[[str], Alone]]:
    begun: list[Alone] = []

    def begin(name: str) -> Alone:
        begun.append(Alone(name, tmp_path))
        begun[-1].begin()
        return begun[-1]

    yield begin
    for one in begun:
        one.sim.call_simulator("leave", {"machines": True})


@pytest.mark.parametrize(("name", "lives"), [("aws_batch", 10), ("gcp_batch", 11)])
def test_a_machine_on_its_last_life_is_replaced_before_it_is_lost(
    alone: Callable[[str], Alone], name: str, lives: int
) -> None:
    """AWS Batch starts a job ten times and Google a task eleven; then nobody would wake the run."""
    run = alone(name)
    first = set(run.view.groups)
    run.lose(lives - 2)
    run.goes_on()
    assert set(run.view.groups) == first, "until now Batch has brought it back"
    run.lose(1)  # the last life begins
    eventually(lambda: {place.token for place in round_places(run.view)} - first)
    assert run.view.failure_counts.get(FailureCause.RESIZE), "it was left at a commit"
    eventually(lambda: len(run.standing()) == 1)
    run.goes_on()
    run.lose(1)
    run.goes_on()
    told = run.finish()
    assert told["chain"] == expected_hash_chain(told["step"])


@pytest.mark.parametrize(("name", "lives"), [("aws_batch", 10), ("gcp_batch", 11)])
def test_one_that_is_lost_for_good_at_once_is_asked_for_anew_by_whoever_attaches(
    alone: Callable[[str], Alone], name: str, lives: int
) -> None:
    run = alone(name)
    first = set(run.view.groups)
    run.lose(lives)
    eventually(lambda: not run.standing())
    told = run.finish()
    assert told["chain"] == expected_hash_chain(told["step"])
    assert set(run.view.groups) != first


@pytest.mark.parametrize("name", ["azure_batch", "kubernetes"])
def test_where_there_is_no_ceiling_one_group_is_brought_back_for_ever(
    alone: Callable[[str], Alone], name: str
) -> None:
    """A node that is preempted requeues its task, a pod that is disrupted counts for nothing."""
    run = alone(name)
    first = set(run.view.groups)
    run.lose(12)
    run.goes_on()
    assert set(run.view.groups) == first
    told = run.finish()
    assert told["chain"] == expected_hash_chain(told["step"])


def round_places(view: JournalView) -> tuple[Any, ...]:
    return view.round.assignments if view.round is not None else ()
