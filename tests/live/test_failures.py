"""Failures of user code are reported to the driver, and retried within the budget."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.client.trainer import TorchTrainer
from spotfit.core.errors import WorkerDiedError
from spotfit.model.events import FailureCause
from spotfit_provisioners.local import processes
from tests.live.cloud import LiveTestCloud

Config = dict[str, Any]
LONG_S = 600.0
"""Longer than the timeout of any test."""


class OutOfTuneError(Exception):
    """A user's own exception."""

    def __init__(self, loss: float) -> None:
        super().__init__(f"the loss is {loss}")
        self.loss = loss


def rank() -> int:
    return spotfit.get_context().get_world_rank()


def save(step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"rank{rank()}").write_text(json.dumps(step))
        checkpoint = spotfit.Checkpoint.from_directory(folder)
        spotfit.report({"step": step}, checkpoint=checkpoint)


def attempt(config: Config) -> int:
    """Return the attempt of this rank, from 1."""
    path = Path(config["marks"], f"attempts-{rank()}")
    made = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(made))
    return made


# --- reported failures ----------------------------------------------------------------------------


def test_user_exception_is_raised_with_rank_and_traceback(cloud: LiveTestCloud) -> None:
    def train() -> None:
        if rank() in (1, 2):
            raise OutOfTuneError(0.5) from OSError("the disk")
        time.sleep(LONG_S)

    with pytest.raises(spotfit.WorkerGroupError) as error_info:
        cloud.fit(train, workers=4)

    failures = error_info.value.worker_failures
    assert set(failures) <= {1, 2}
    for of_rank, error in failures.items():
        assert type(error).__name__ == "OutOfTuneError"
        assert getattr(error, "loss", None) == 0.5
        [note] = error.__notes__
        assert f"raised in the worker of rank {of_rank}" in note
        assert "raise OutOfTuneError(0.5)" in note
    assert "OSError: the disk" in str(error_info.value)
    assert "the loss is 0.5" in str(error_info.value)


def test_equal_errors_are_reported_once_with_all_ranks(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> None:
        spotfit.collective.barrier()
        if rank() != 1:
            raise ValueError(f"rank {rank()} has no data")
        time.sleep(LONG_S)

    with pytest.raises(spotfit.WorkerGroupError) as error_info:
        cloud.fit(train, workers=3)

    failures = error_info.value.worker_failures
    ranks = ",".join(map(str, sorted(failures)))
    assert f"[Rank {ranks} Error Snippet]:" in str(error_info.value)
    assert str(error_info.value).count("Traceback") == 1
    assert all(isinstance(error, ValueError) for error in failures.values())


@pytest.mark.parametrize(
    ("leave", "kind"),
    [
        (lambda: sys.exit(0), SystemExit),
        (lambda: sys.exit("no more"), SystemExit),
        (lambda: (_ for _ in ()).throw(KeyboardInterrupt), KeyboardInterrupt),
    ],
    ids=["exit 0", "exit with words", "KeyboardInterrupt"],
)
def test_early_exit_of_a_worker_is_a_failure(
    cloud: LiveTestCloud, leave: Any, kind: type[BaseException]
) -> None:
    def train() -> None:
        if rank() == 1:
            leave()
        time.sleep(LONG_S)

    with pytest.raises(spotfit.WorkerGroupError) as error_info:
        cloud.fit(train, workers=2)

    assert type(error_info.value.worker_failures[1]) is kind


@pytest.mark.parametrize(
    ("exit_worker", "description"),
    [
        (lambda: os._exit(3), "exited with code 3"),
        (lambda: os._exit(0), "exited with code 0 before its function had returned"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM"),
    ],
    ids=["exit 3", "exit 0", "SIGKILL", "SIGSEGV", "SIGTERM"],
)
def test_killed_worker_is_reported_with_its_signal(
    cloud: LiveTestCloud, exit_worker: Any, description: str
) -> None:
    def train() -> None:
        if rank() == 1:
            exit_worker()
        time.sleep(LONG_S)

    with pytest.raises(spotfit.WorkerGroupError, match=description) as error_info:
        cloud.fit(train, workers=2)

    assert set(error_info.value.worker_failures) == {1}
    error = error_info.value.worker_failures[1]
    assert isinstance(error, WorkerDiedError)
    assert description in str(error)


def test_exception_is_returned_without_unpicklable_attributes(cloud: LiveTestCloud) -> None:
    def train() -> None:
        error = ValueError("holds a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(spotfit.WorkerGroupError, match="holds a lock") as error_info:
        cloud.fit(train)

    raised = error_info.value.worker_failures[0]
    assert (type(raised), raised.args) == (ValueError, ("holds a lock",))
    assert not hasattr(raised, "lock")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: __import__("threading").Lock(), "cannot be pickled"),
        (lambda: [__import__("torch").ones(1)], "holds torch tensors"),
    ],
    ids=["a lock", "a tensor"],
)
def test_unpicklable_return_value_fails_the_worker(
    cloud: LiveTestCloud, make: Any, why: str
) -> None:
    with pytest.raises(spotfit.WorkerGroupError, match=why):
        cloud.fit(lambda: make())


def test_child_processes_end_with_their_worker(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> None:
        import subprocess

        child = subprocess.Popen(["/bin/sleep", str(LONG_S)])
        Path(config["marks"], "child").write_text(str(child.pid))
        os._exit(1)

    with pytest.raises(spotfit.WorkerGroupError):
        cloud.fit(train)

    assert processes.find_process(int((cloud.marks / "child").read_text())) is None


# --- retries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exit_worker",
    [
        lambda: (_ for _ in ()).throw(ValueError("bad luck")),
        lambda: os._exit(1),
        lambda: os.kill(os.getpid(), signal.SIGKILL),
    ],
    ids=["raise", "exit", "SIGKILL"],
)
def test_all_ranks_restart_from_the_same_checkpoint(cloud: LiveTestCloud, exit_worker: Any) -> None:
    def train(config: Config) -> Any:
        checkpoint = spotfit.get_checkpoint()
        if checkpoint is None:
            save(1)
            spotfit.report({"step": 2})  # without files, so that it is repeated
            spotfit.collective.barrier()
            if rank() == 1:
                exit_worker()
            time.sleep(LONG_S)
        assert checkpoint is not None
        with checkpoint.as_directory() as folder:
            files = sorted(path.name for path in Path(folder).iterdir())
        output = {"path": checkpoint.path, "files": files, "process": os.getpid()}
        Path(config["marks"], f"restored-{rank()}").write_text(json.dumps(output))
        return checkpoint.path

    result = cloud.fit(train, workers=3, nodes=2, max_failures=1)

    restored = [json.loads(path.read_text()) for path in cloud.marks.glob("restored-*")]
    assert len(restored) == 3
    assert {output["path"] for output in restored} == {result.return_value}
    assert all(output["files"] == ["rank0", "rank1", "rank2"] for output in restored)
    [closed] = cloud.rounds_closed()
    assert closed.cause == FailureCause.WORKER


def test_run_fails_after_max_failures_retries(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> None:
        save(attempt(config))
        raise ValueError("never works")

    with pytest.raises(spotfit.WorkerGroupError, match="never works"):
        cloud.fit(train, max_failures=2)

    assert (cloud.marks / "attempts-0").read_text() == "3"
    assert len(cloud.rounds_opened()) == 3
    status = spotfit.attach(cloud.url()).status()
    assert (status.state, status.failures, len(status.checkpoints)) == ("failed", {"worker": 3}, 3)


def test_restarted_run_resumes_after_a_failure(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> str | None:
        checkpoint = spotfit.get_checkpoint()
        if checkpoint is None:
            save(1)
            raise ValueError("a bug, to be corrected")
        return checkpoint.path

    with pytest.raises(spotfit.WorkerGroupError):
        cloud.fit(train)
    result = cloud.fit(train)

    assert result.checkpoint is not None
    assert result.return_value == result.checkpoint.path


def test_lost_machines_and_failed_workers_have_separate_retry_budgets(
    cloud: LiveTestCloud,
) -> None:
    def train(config: Config) -> str:
        made = attempt(config)
        if made == 1:
            Path(config["marks"], "at work").touch()
            time.sleep(LONG_S)
        if made == 2:
            raise ValueError("once")
        return f"attempt {made}"

    failure = spotfit.FailureConfig(max_failures=1, max_preemption_failures=1)
    handle = cloud.submit(train, failure_config=failure)
    cloud.wait_for_mark("at work")
    cloud.reclaimer.kill(cloud.node_of_rank(0))

    assert handle.result(60).return_value == "attempt 3"
    assert [closed.cause for closed in cloud.rounds_closed()] == [
        FailureCause.PREEMPTION,
        FailureCause.WORKER,
    ]


def test_exceeded_preemption_budget_raises_preemption_error(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> None:
        Path(config["marks"], "at work").touch()
        time.sleep(LONG_S)

    failure = spotfit.FailureConfig(max_failures=-1, max_preemption_failures=0)
    handle = cloud.submit(train, workers=2, nodes=2, failure_config=failure)
    cloud.wait_for_mark("at work")
    cloud.reclaimer.kill(cloud.node_of_rank(1))

    with pytest.raises(
        spotfit.PreemptionError, match=r"the last preemption affected ranks \[1\]"
    ) as error_info:
        handle.result(60)
    assert error_info.value.preemption_info.preempted_ranks == [1]
    assert error_info.value.drain_timed_out is False


# --- collectives with a killed peer ---------------------------------------------------------------


def test_killed_peer_aborts_a_collective(cloud: LiveTestCloud) -> None:
    def train(config: Config) -> float:
        import torch
        import torch.distributed as dist

        if attempt(config) == 1 and rank() == 1:
            Path(config["marks"], "died at").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        Path(config["marks"], "met at").write_text(str(time.time()))
        return float(ones)

    result = cloud.fit(train, workers=2, trainer_type=TorchTrainer, max_failures=1)

    times = [float((cloud.marks / name).read_text()) for name in ("died at", "met at")]
    assert result.return_value == 2.0
    assert times[1] - times[0] < 20.0  # torch alone would wait for minutes


# --- machines without an agent --------------------------------------------------------------------


def test_machines_that_start_no_agent_end_the_run_with_their_output(cloud: LiveTestCloud) -> None:
    """With the default limits, which allow any number of failures of the platform."""
    with pytest.raises(spotfit.ControllerError) as raised:
        cloud.fit(lambda: None, local_options={"agent": "nosuchmodule:serve"})
    assert "ModuleNotFoundError: No module named 'nosuchmodule'" in str(raised.value)
    assert "_load_agent_function" in str(raised.value), "the traceback that the machine printed"
    assert "spotfit logs --machine" in str(raised.value)


def test_agents_that_crash_with_the_same_traceback_end_the_run_with_it(
    cloud: LiveTestCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import spotfit.agent.driver as driver
from spotfit.agent.agent import Agent

_tick = Agent.tick

def tick(self, now):
    if self._ledger.journal_view.next_slot > 0 and self._ledger.view.round is not None:
        raise LookupError(f"a bug of agent {self._ledger.agent_id}")
    return _tick(self, now)

def serve(assignment, *, fork_servers=None):
    Agent.tick = tick
    return driver.serve(assignment, fork_servers=fork_servers)
"""
    (cloud.folder / "crashing_agent.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(cloud.folder))
    with pytest.raises(spotfit.ControllerError) as raised:
        cloud.fit(lambda: time.sleep(LONG_S), local_options={"agent": "crashing_agent:serve"})
    assert "crash 2 with this traceback" in str(raised.value)
    assert "LookupError: a bug of agent" in str(raised.value)
    assert {FailureCause.PLATFORM} == cloud.view().failure_counts.keys()
