"""Runs are independent of their driver: attach, rejoin, cancel and interrupt."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.core.errors import RunActiveError, RunCancelledError, RunNotFoundError
from spotfit_provisioners.local import processes
from tests.live.cloud import LiveTestCloud, eventually

Config = dict[str, Any]

SCRIPT = """
    import os, tempfile, time
    from pathlib import Path
    import spotfit

    def train(config):
        rank = spotfit.get_context().get_world_rank()
        Path(config["marks"], f"started-{rank}-{os.getpid()}").touch()
        print("at work")
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "weights").write_text("1")
            checkpoint = spotfit.Checkpoint.from_directory(folder)
            spotfit.report({"step": 1}, checkpoint=checkpoint)
        while not Path(config["marks"], "enough").exists():
            time.sleep(0.01)
        return final_value()

    def final_value():
        return "trained to the end"

    if __name__ == "__main__":
        result = spotfit.DataParallelTrainer(
            train,
            train_loop_config={"marks": os.environ["MARKS"]},
            scaling_config=spotfit.ScalingConfig(num_workers=2),
            run_config=spotfit.RunConfig("run", os.environ["STORAGE"]),
        ).fit()
        print("result:", result.return_value)
"""


@pytest.fixture
def cloud(cold_cloud: LiveTestCloud) -> LiveTestCloud:
    """The tests look at all machines of the local cloud."""
    return cold_cloud


def wait_for_enough(config: Config) -> str:
    """A training function that runs until a mark exists."""
    (Path(config["marks"]) / "at work").touch()
    print("at work")
    while not Path(config["marks"], "enough").exists():
        time.sleep(0.01)
    return "trained to the end"


def started_pids(cloud: LiveTestCloud) -> set[int]:
    """All processes that have executed the function of the script."""
    return {int(mark.name.rpartition("-")[2]) for mark in cloud.marks.glob("started-*")}


def running_pids(pids: set[int]) -> set[int]:
    return {pid for pid in pids if processes.find_process(pid) is not None}


# --- run handles ----------------------------------------------------------------------------------


def test_submit_returns_before_the_result(cloud: LiveTestCloud) -> None:
    handle = cloud.submit(wait_for_enough)
    assert handle.status().state == "waiting"
    with pytest.raises(TimeoutError, match="has not ended"):
        handle.result(timeout_s=0.1)
    cloud.wait_for_mark("at work")
    cloud.write_mark("enough")

    assert handle.result(60).return_value == "trained to the end"
    assert handle.result(60).return_value == "trained to the end"  # repeatable
    assert handle.status().state == "finished"


def test_attach_returns_status_and_result_of_a_run(cloud: LiveTestCloud) -> None:
    cloud.submit(wait_for_enough, workers=2, nodes=2)
    cloud.wait_for_mark("at work")

    handle = spotfit.attach(cloud.url())
    status = eventually(lambda: (s := handle.status()).state == "running" and s)
    assert isinstance(status, type(handle.status()))
    assert (status.name, status.round, status.workers, status.machines) == ("run", 1, 2, 2)
    written = ["(rank 0) at work", "(rank 1) at work"]
    eventually(lambda: sorted(line for line in handle.logs() if "(rank" in line) == written)

    cloud.write_mark("enough")
    assert handle.result(60).return_value == "trained to the end"
    assert spotfit.attach(Path(cloud.url())).result(60).return_value == "trained to the end"


def test_result_of_a_failed_run_raises_in_every_client(cloud: LiveTestCloud) -> None:
    def train() -> None:
        raise LookupError("no such data")

    with pytest.raises(spotfit.WorkerGroupError):
        cloud.fit(train)
    with pytest.raises(spotfit.WorkerGroupError, match="no such data") as error_info:
        spotfit.attach(cloud.url()).result(60)
    assert isinstance(error_info.value.worker_failures[0], LookupError)


def test_cancel_from_another_process_ends_the_run(cloud: LiveTestCloud) -> None:
    handle = cloud.submit(wait_for_enough, workers=2)
    cloud.wait_for_mark("at work")

    spotfit.attach(cloud.url()).cancel("no money left")

    with pytest.raises(RunCancelledError, match="no money left"):
        handle.result(60)
    assert handle.status().state == "cancelled"
    handle.cancel()  # no effect on an ended run


def test_run_without_machines_can_be_cancelled(cloud: LiveTestCloud) -> None:
    handle = cloud.submit(wait_for_enough, local_options={"capacity": 0})
    handle.cancel()
    with pytest.raises(RunCancelledError):
        handle.result(60)
    assert not (cloud.marks / "at work").exists()


def test_attach_without_a_run_raises(cloud: LiveTestCloud) -> None:
    Path(cloud.storage).mkdir()
    with pytest.raises(RunNotFoundError, match="no run at"):
        spotfit.attach(cloud.storage)
    with pytest.raises(RunNotFoundError, match="no run at"):
        spotfit.attach(cloud.url("another"))


# --- without the driver ---------------------------------------------------------------------------


def test_run_survives_its_driver(cloud: LiveTestCloud) -> None:
    driver = cloud.driver(SCRIPT)
    eventually(lambda: len(started_pids(cloud)) == 2)
    driver.kill()

    handle = spotfit.attach(cloud.url())
    assert handle.status().state == "running"
    cloud.write_mark("enough")
    result = handle.result(60)

    assert result.return_value == "trained to the end"
    assert result.metrics == {"step": 1}
    assert len(cloud.rounds_opened()) == 1
    assert len(started_pids(cloud)) == 2


def test_same_script_rejoins_an_active_run(cloud: LiveTestCloud) -> None:
    first = cloud.driver(SCRIPT)
    eventually(lambda: len(started_pids(cloud)) == 2)
    first.kill()
    second = cloud.driver(SCRIPT)
    third = cloud.driver(SCRIPT)
    for driver in (second, third):
        eventually(lambda driver=driver: "(rank 0) at work" in driver.output)  # type: ignore[misc]
    cloud.write_mark("enough")

    for driver in (second, third):
        assert driver.wait() == 0, driver.output
        assert "result: trained to the end" in driver.output
    assert len(started_pids(cloud)) == 2


def test_edited_script_does_not_rejoin(cloud: LiveTestCloud) -> None:
    first = cloud.driver(SCRIPT)
    eventually(lambda: len(started_pids(cloud)) == 2)
    edited = cloud.driver(SCRIPT.replace('"trained to the end"', '"the other way"'))
    assert edited.wait() == 1
    assert "changed after its start" in edited.output
    cloud.write_mark("enough")
    assert first.wait() == 0, first.output


def test_second_run_of_an_active_name_is_rejected(cloud: LiveTestCloud) -> None:
    handle = cloud.submit(wait_for_enough)
    cloud.wait_for_mark("at work")
    with pytest.raises(RunActiveError, match="A run named 'run' is active"):
        cloud.fit(lambda: "another function")
    with pytest.raises(RunActiveError, match="A run named 'run' is active"):
        cloud.fit(wait_for_enough, config={"rate": 0.1})
    cloud.write_mark("enough")
    assert handle.result(60).return_value == "trained to the end"


# --- Ctrl-C --------------------------------------------------------------------------------------


def test_ctrl_c_cancels_the_run(cloud: LiveTestCloud) -> None:
    driver = cloud.driver(SCRIPT)
    eventually(lambda: len(started_pids(cloud)) == 2)
    driver.interrupt()

    assert driver.wait() in (-signal.SIGINT, 130)
    assert driver.output.rstrip().endswith("KeyboardInterrupt")
    eventually(lambda: not running_pids(started_pids(cloud)))
    eventually(lambda: not any(machine.is_alive for machine in cloud.root.machines()))
    assert spotfit.attach(cloud.url()).status().state == "cancelled"


def test_third_ctrl_c_exits_at_once(cloud: LiveTestCloud) -> None:
    driver = cloud.driver(SCRIPT)
    eventually(lambda: len(started_pids(cloud)) == 2)
    for pid in running_pids({machine.pid for machine in cloud.root.machines()}):
        os.kill(pid, signal.SIGSTOP)  # no process remains that could end the run in time
    try:
        for count in range(3):
            driver.interrupt()
            if count < 2:
                eventually(lambda n=count: driver.output.count("run.interrupted") > n)  # type: ignore[misc]
        assert driver.wait() == 130
    finally:
        for machine in cloud.root.machines():
            os.kill(machine.pid, signal.SIGCONT)
    eventually(lambda: spotfit.attach(cloud.url()).status().state == "cancelled")
