"""Preemptions with and without notice; the run resumes from its last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.client.run_handle import RunHandle
from spotfit.host.memory import SHARED_MEMORY_DIR
from spotfit.model.events import (
    FailureCause,
    GroupPlanned,
    PreemptionNoticed,
    RoundClosed,
    RoundOpened,
)
from spotfit.store.factory import open_store
from tests.live.cloud import LiveTestCloud, eventually

Config = dict[str, Any]


def step_by_step(config: Config) -> dict[str, Any]:
    """Save every step until the mark 'enough' exists; write a mark at each start."""
    me = spotfit.get_context()
    rank, marks = me.get_world_rank(), Path(config["marks"])
    checkpoint = spotfit.get_checkpoint()
    started_at = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            started_at = int(Path(folder, "step").read_text())
    start = {"from": started_at, "world": me.get_world_size(), "seen": time.monotonic_ns()}
    (marks / f"start-{rank}-{start['seen']}").write_text(json.dumps(start))
    step = started_at
    enough = False
    while not enough:
        step += 1
        report(step, rank)
        time.sleep(0.02)
        enough = spotfit.collective.broadcast_from_rank_zero((marks / "enough").exists())
    return {"begun_at": started_at, "step": step}


def report(step: int, rank: int) -> None:
    if rank > 0:
        spotfit.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "step").write_text(str(step))
        checkpoint = spotfit.Checkpoint.from_directory(folder)
        spotfit.report({"step": step}, checkpoint=checkpoint)


def start_run(cloud: LiveTestCloud, **how: Any) -> RunHandle:
    """Two workers on two nodes that have saved a checkpoint."""
    keep = spotfit.CheckpointConfig(num_to_keep=3)
    handle = cloud.submit(step_by_step, workers=2, nodes=2, checkpoint_config=keep, **how)
    wait_for_commit(cloud, 2)
    return handle


def wait_for_commit(cloud: LiveTestCloud, minimum: int) -> int:
    """Wait until at least the step `minimum` is committed; return the latest committed step."""

    def latest_step() -> int | None:
        latest = cloud.view().latest_checkpoint
        step = int(latest.metrics["step"]) if latest else 0
        return step if step >= minimum else None

    found = eventually(latest_step)
    assert found is not None
    return found


def recorded_starts(cloud: LiveTestCloud) -> list[dict[str, Any]]:
    """Return all starts of all ranks, ordered by time."""
    result = [
        json.loads(mark.read_text()) for mark in cloud.marks.glob("start-*") if mark.stat().st_size
    ]
    return sorted(result, key=lambda start: int(start["seen"]))


def wait_for_round(
    cloud: LiveTestCloud, *, workers: int = 2, number: int = 2
) -> list[dict[str, Any]]:
    """Wait until all workers of round `number` have started; return their starts."""
    eventually(lambda: len(cloud.rounds_opened()) >= number)
    eventually(lambda: len(recorded_starts(cloud)) >= workers * number)
    return recorded_starts(cloud)[workers * (number - 1) :]


def check_resumed(cloud: LiveTestCloud, handle: RunHandle, saved: int) -> None:
    """Check that all ranks of the second round resumed from the checkpoint, then end the run."""
    second = wait_for_round(cloud)
    assert len({start["from"] for start in second}) == 1
    assert second[0]["from"] >= saved
    cloud.write_mark("enough")
    result = handle.result(60)
    assert result.return_value["begun_at"] >= saved
    assert result.metrics == {"step": result.return_value["step"]}


# --- without notice -------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["the leader's node", "another node"])
def test_node_killed_without_notice_is_replaced(cloud: LiveTestCloud, target: str) -> None:
    handle = start_run(cloud)
    leader = cloud.node_of_leader()
    others = [node for node in cloud.reclaimer.running_nodes() if node != leader]
    saved = wait_for_commit(cloud, 2)
    cloud.reclaimer.kill(leader if target == "the leader's node" else others[0])

    check_resumed(cloud, handle, saved)
    assert [closed.cause for closed in cloud.rounds_closed()] == [FailureCause.PREEMPTION]
    assert handle.status().failures == {"preemption": 1}


def test_unresponsive_node_that_continues_is_not_a_preemption(cloud: LiveTestCloud) -> None:
    """Its agent is suspended, as by a network failure."""
    handle = start_run(cloud)
    (other,) = set(cloud.reclaimer.running_nodes()) - {cloud.node_of_leader()}
    machine = other.machine()
    assert machine is not None
    saved = wait_for_commit(cloud, 2)
    os.kill(machine.pid, signal.SIGSTOP)
    try:
        check_resumed(cloud, handle, saved)
    finally:
        with suppress(ProcessLookupError):  # the run may have released it
            os.kill(machine.pid, signal.SIGCONT)
    assert [closed.cause for closed in cloud.rounds_closed()] == [FailureCause.NETWORK]
    assert handle.status().failures == {"platform": 1}


def test_all_nodes_killed_at_once_are_replaced_by_the_driver(cloud: LiveTestCloud) -> None:
    handle = start_run(cloud)
    saved = wait_for_commit(cloud, 2)
    for node in cloud.reclaimer.running_nodes():
        cloud.reclaimer.kill(node)

    check_resumed(cloud, handle, saved)
    assert [closed.cause for closed in cloud.rounds_closed()] == [FailureCause.PREEMPTION]


def test_attach_restarts_a_run_without_nodes_and_driver(
    cloud: LiveTestCloud,
) -> None:
    driver = cloud.driver("""
        import os, time
        from pathlib import Path
        import spotfit

        def train(config):
            Path(config["marks"], "at work").touch()
            while not Path(config["marks"], "enough").exists():
                time.sleep(0.01)
            return "revived"

        if __name__ == "__main__":
            spotfit.DataParallelTrainer(
                train,
                train_loop_config={"marks": os.environ["MARKS"]},
                run_config=spotfit.RunConfig("run", os.environ["STORAGE"]),
            ).fit()
    """)
    cloud.wait_for_mark("at work")
    driver.kill()
    for node in cloud.reclaimer.running_nodes():
        cloud.reclaimer.kill(node)
    cloud.write_mark("enough")

    assert spotfit.attach(cloud.url()).result(60).return_value == "revived"


# --- with notice ----------------------------------------------------------------------------------


def test_notice_requests_the_replacement_and_costs_only_a_restart(
    cloud: LiveTestCloud,
) -> None:
    handle = start_run(cloud)
    leaving = cloud.node_of_rank(1)
    cloud.reclaimer.notify(leaving, seconds_left=60.0)

    second = wait_for_round(cloud)
    events = cloud.events()
    result = next(n for n, event in enumerate(events) if isinstance(event, PreemptionNoticed))
    ordered = next(
        n for n, event in enumerate(events[result:], result) if isinstance(event, GroupPlanned)
    )
    closed = next(n for n, event in enumerate(events) if isinstance(event, RoundClosed))
    assert result < ordered < closed, "training continued while the replacement booted"
    first = events[closed]
    assert isinstance(first, RoundClosed)
    assert (first.cause, first.reason) == (
        FailureCause.PREEMPTION,
        "checkpoint saved after the preemption notice; replacement ready",
    )
    cloud.reclaimer.kill(leaving)
    after = next(event for event in cloud.events()[closed:] if isinstance(event, RoundOpened))
    places = {(place.token, place.node) for place in after.round.assignments}
    assert (leaving.group.token, leaving.number) not in places
    assert len({start["from"] for start in second}) == 1
    cloud.write_mark("enough")
    handle.result(60)
    assert len(cloud.rounds_closed()) == 1


def test_replaced_machines_store_all_output_and_free_their_memory(
    cloud: LiveTestCloud, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a bucket: output is stored every half second, and the last of it takes a request."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    cloud.storage = "s3://runs"

    def train(config: Config) -> None:
        marks = Path(config["marks"])
        started_at = 0 if spotfit.get_checkpoint() is None else 1
        rank = spotfit.get_context().get_world_rank()
        count = os.open(marks / f"count-{started_at}-{rank}", os.O_CREAT | os.O_WRONLY)
        step = number = 0
        enough = False
        while not enough:
            for _ in range(20):
                print(f"line {started_at}-{rank} {number};")
                os.pwrite(count, b"%09d" % number, 0)
                number += 1
            step += 1
            report(step, rank)
            time.sleep(0.01)
            enough = spotfit.collective.broadcast_from_rank_zero((marks / "enough").exists())

    handle = cloud.submit(train, workers=2, nodes=2)
    wait_for_commit(cloud, 2)
    leaving = cloud.reclaimer.running_nodes()
    for node in leaving:
        cloud.reclaimer.notify(node, seconds_left=60.0)
    eventually(lambda: len(list(cloud.marks.glob("count-1-*"))) == 2)
    eventually(lambda: not any(node.path.exists() for node in leaving))
    cloud.write_mark("enough")
    handle.result(60)

    store = open_store(cloud.url())
    output = b"".join(store.get(one.key) for one in store.list(".spotfit/logs")).decode()
    lost = [
        f"line {source} {number};"
        for count in cloud.marks.glob("count-*")
        for source in [count.name.removeprefix("count-")]
        for number in range(int(count.read_text()) + 1)
        if f"line {source} {number};" not in output
    ]
    assert lost == []
    agents = [Path(one.key).stem for one in store.list(".spotfit/members")]
    assert len(agents) == 4
    shared = [SHARED_MEMORY_DIR / f"spotfit-{os.getuid()}-{agent}" for agent in agents]
    eventually(lambda: not any(folder.exists() for folder in shared), within_s=5.0)


def test_all_ranks_receive_the_same_notice(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> None:
        me = spotfit.get_context()
        marks = Path(config["marks"])
        (marks / f"at work {me.get_world_rank()}").touch()
        info = None
        while info is None:
            info = spotfit.get_preemption_info()
            time.sleep(0.01)
        result = [info.preempted_ranks, info.preempted_node_ids, info.deadline_ms]
        (marks / f"notice {me.get_world_rank()}").write_text(json.dumps(result))

    handle = cloud.submit(train, workers=4, nodes=2)
    for rank in range(4):
        cloud.wait_for_mark(f"at work {rank}")
    leaving = cloud.node_of_rank(2)
    noticed_ms = time.time() * 1000
    cloud.reclaimer.notify(leaving, seconds_left=60.0)

    handle.result(60)
    result = [json.loads((cloud.marks / f"notice {rank}").read_text()) for rank in range(4)]
    assert all(each == result[0] for each in result)
    ranks, nodes, deadline_ms = result[0]
    assert ranks == [2, 3]
    assert nodes == [f"{leaving.group.token}/{leaving.number}"]
    assert abs(deadline_ms - noticed_ms - 60_000) < 30_000


def test_error_of_all_ranks_on_a_notice_is_charged_to_the_function(cloud: LiveTestCloud) -> None:
    """Although rank 1 runs on the machine that leaves."""

    def train(config: Config) -> None:
        (Path(config["marks"]) / f"at work {spotfit.get_context().get_world_rank()}").touch()
        while spotfit.get_preemption_info() is None:
            time.sleep(0.01)
        raise RuntimeError("a bug in the save")

    handle = cloud.submit(train, workers=2, nodes=2)
    for rank in (0, 1):
        cloud.wait_for_mark(f"at work {rank}")
    cloud.reclaimer.notify(cloud.node_of_rank(1), seconds_left=60.0)

    with pytest.raises(spotfit.WorkerGroupError, match="a bug in the save"):
        handle.result(60)
    assert cloud.rounds_closed()[0].cause == FailureCause.WORKER
    # One rank may be stopped for the error of the other one before it has raised its own.
    expected = {f"(rank {rank}) RuntimeError: a bug in the save" for rank in (0, 1)}
    # The machines store their last lines while the caller has the result already.
    eventually(lambda: expected & set(handle.logs()))


def test_error_of_a_leaving_rank_alone_is_in_the_log_and_in_the_reason(
    cloud: LiveTestCloud,
) -> None:
    def train(config: Config) -> None:
        marks, rank = Path(config["marks"]), spotfit.get_context().get_world_rank()
        if (marks / "raised").exists():
            return
        (marks / f"at work {rank}").touch()
        while spotfit.get_preemption_info() is None:
            time.sleep(0.01)
        if rank == 0:
            time.sleep(600)
        (marks / "raised").touch()
        raise RuntimeError("a bug in the save")

    handle = cloud.submit(train, workers=2, nodes=2)
    for rank in (0, 1):
        cloud.wait_for_mark(f"at work {rank}")
    cloud.reclaimer.notify(cloud.node_of_rank(1), seconds_left=60.0)

    handle.result(60)
    (closed,) = cloud.rounds_closed()
    assert closed.cause == FailureCause.PREEMPTION
    assert closed.reason.endswith("rank 1 raised: RuntimeError: a bug in the save")
    assert "(rank 1) RuntimeError: a bug in the save" in list(handle.logs())


def test_group_that_returns_before_the_deadline_finishes(
    cloud: LiveTestCloud,
) -> None:
    def train(config: Config) -> str:
        while spotfit.get_preemption_info() is None:
            (Path(config["marks"]) / "at work").touch()
            time.sleep(0.01)
        return "saved and left"

    handle = cloud.submit(train)
    cloud.wait_for_mark("at work")
    cloud.reclaimer.notify(cloud.node_of_rank(0), seconds_left=60.0)

    assert handle.result(60).return_value == "saved and left"
    assert cloud.rounds_closed() == []


def test_group_without_a_save_before_the_deadline_resumes_from_the_last_checkpoint(
    cloud: LiveTestCloud,
) -> None:
    def train(config: Config) -> str:
        marks = Path(config["marks"])
        checkpoint = spotfit.get_checkpoint()
        if checkpoint is not None:
            return Path(checkpoint.path).name
        with tempfile.TemporaryDirectory() as folder:
            first = spotfit.Checkpoint.from_directory(folder)
            (Path(folder) / "weights").touch()
            spotfit.report({"step": 1}, checkpoint=first, checkpoint_dir_name="the_first")
        (marks / "saved").touch()
        while True:
            time.sleep(0.01)

    handle = cloud.submit(train)
    cloud.wait_for_mark("saved")
    leaving = cloud.node_of_rank(0)
    cloud.reclaimer.notify(leaving, seconds_left=1.0)
    eventually(lambda: cloud.rounds_closed())
    cloud.reclaimer.kill(leaving)

    assert handle.result(60).return_value == "the_first"
    assert cloud.rounds_closed()[0].cause == FailureCause.PREEMPTION


def test_relaxed_collectives_save_without_the_preempted_ranks(
    cloud: LiveTestCloud,
) -> None:
    def train(config: Config) -> str:
        checkpoint = spotfit.get_checkpoint()
        if checkpoint is not None:
            return Path(checkpoint.path).name
        if spotfit.get_context().get_world_rank() == 1:
            (Path(config["marks"]) / "at work").touch()
            time.sleep(600)
        while spotfit.get_preemption_info() is None:
            time.sleep(0.05)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = spotfit.Checkpoint.from_directory(folder)
            spotfit.report({"step": 1}, checkpoint=checkpoint, checkpoint_dir_name="without_rank_1")
        time.sleep(600)
        return "unreachable"

    relaxed = spotfit.FailureConfig(relax_collectives_on_preemption=True)
    handle = cloud.submit(train, workers=2, nodes=2, failure_config=relaxed)
    cloud.wait_for_mark("at work")
    cloud.reclaimer.notify(cloud.node_of_rank(1), seconds_left=6.0)

    assert handle.result(60).return_value == "without_rank_1"
    assert [closed.cause for closed in cloud.rounds_closed()] == [FailureCause.PREEMPTION]
