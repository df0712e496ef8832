"""An elastic group shrinks without capacity and grows again."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import spotfit
from spotfit.client.run_handle import RunHandle
from spotfit.model.events import FailureCause
from tests.live.cloud import LiveTestCloud, eventually

Config = dict[str, Any]


def save_until_mark(config: Config) -> list[int]:
    """Save the sizes of all groups so far in every step, until the mark 'enough' exists."""
    me = spotfit.get_context()
    sizes = [*sizes_before(), me.get_world_size()]
    (Path(config["marks"]) / f"size {me.get_world_size()}").touch()
    enough = False
    while not enough:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "sizes").write_text(" ".join(map(str, sizes)))
            checkpoint = (
                spotfit.Checkpoint.from_directory(folder) if not me.get_world_rank() else None
            )
            spotfit.report({"sizes": sizes}, checkpoint=checkpoint)
        time.sleep(0.05)
        seen = (Path(config["marks"]) / "enough").exists()
        enough = spotfit.collective.broadcast_from_rank_zero(seen)
    return sizes


def sizes_before() -> list[int]:
    checkpoint = spotfit.get_checkpoint()
    if checkpoint is None:
        return []
    with checkpoint.as_directory() as folder:
        return [int(size) for size in Path(folder, "sizes").read_text().split()]


def start_run(cloud: LiveTestCloud, **local: Any) -> RunHandle:
    """One or two workers, one per node, with frequent resize checks."""
    return cloud.submit(
        save_until_mark,
        workers=(1, 2),
        nodes=2,
        local_options=local,
        scaling_options={"elastic_resize_monitor_interval_s": 0.2},
        checkpoint_config=spotfit.CheckpointConfig(num_to_keep=2),
    )


def wait_until_saved(cloud: LiveTestCloud, workers: int) -> None:
    def has_saved() -> bool:
        view = cloud.view()
        saved = view.latest_committed_slot > view.round_opened_slot
        return view.round is not None and view.round.world_size == workers and saved

    eventually(has_saved)


def test_elastic_group_starts_with_the_available_machines(cloud: LiveTestCloud) -> None:
    handle = start_run(cloud, capacity=1)
    wait_until_saved(cloud, 1)
    cloud.write_mark("enough")
    assert handle.result(60).return_value == [1]


def test_elastic_group_shrinks_and_grows_again(cloud: LiveTestCloud) -> None:
    handle = start_run(cloud)
    wait_until_saved(cloud, 2)
    cloud.reclaimer.set_capacity(1)
    cloud.reclaimer.kill(cloud.node_of_rank(1))
    wait_until_saved(cloud, 1)
    cloud.reclaimer.set_capacity(None)
    wait_until_saved(cloud, 2)
    cloud.write_mark("enough")

    assert handle.result(60).return_value == [2, 1, 2]
    assert [closed.cause for closed in cloud.rounds_closed()] == [
        FailureCause.PREEMPTION,
        FailureCause.RESIZE,
    ]
    assert cloud.view().failure_counts.get(FailureCause.WORKER) is None


def test_group_below_its_minimum_size_waits(cloud: LiveTestCloud) -> None:
    handle = cloud.submit(save_until_mark, workers=(2, 3), nodes=3, local_options={"capacity": 1})
    eventually(lambda: handle.status().reason)
    assert (handle.status().state, cloud.rounds_opened()) == ("waiting", [])
    assert "of 1 are free" in handle.status().reason

    cloud.reclaimer.set_capacity(2)
    wait_until_saved(cloud, 2)
    cloud.write_mark("enough")
    assert handle.result(60).return_value == [2]


def test_fixed_group_waits_for_capacity(cloud: LiveTestCloud) -> None:
    handle = cloud.submit(lambda: "came after all", local_options={"capacity": 0})
    eventually(lambda: handle.status().reason)
    cloud.reclaimer.set_capacity(1)
    assert handle.result(60).return_value == "came after all"
