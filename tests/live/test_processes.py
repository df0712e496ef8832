"""Real processes and kills: failures are reported, and no process remains."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spotfit.agent.worker_pool import ProcessWorkerPool
from spotfit.fork_server.fork_client import ForkServerPool
from spotfit.host import process
from spotfit.protocol.agent_sidecar import SidecarInit
from spotfit.protocol.worker_agent import WorkerRaised, WorkerReturned
from spotfit.sidecar.callbacks import ProcessCallbackRunner
from tests.live.worker_pool_harness import RUN_ID, SECRET, WorkerPoolHarness

# --- training functions ---------------------------------------------------------------------------


def join_group_and_wait() -> None:
    import signal as signals

    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    print("met", int(ones))
    signals.pause()


def join_group() -> float:
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)


def fork_and_wait() -> None:
    import os
    import signal as signals
    import subprocess
    import sys

    sleeper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    if os.fork() == 0:
        signals.pause()
    print("sleeper", sleeper.pid)
    signals.pause()


def print_and_die() -> None:
    import os
    import sys

    for number in range(2000):
        print("line", number)
    print("no newline", end="")
    sys.stdout.flush()
    os.kill(os.getpid(), 9)


def raise_it() -> None:
    raise KeyError("weights")


def exit_cleanly() -> None:
    sys.exit(0)


def return_location() -> tuple[Any, ...]:
    import os
    import random
    from pathlib import Path

    return (os.environ["RANK"], os.environ.get("MINE"), str(Path.cwd()), random.random())


class PrintingCallback:
    """A callback."""

    def after_report(self, *, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        print("received", run_context, metrics, checkpoint)
        if metrics[0]["loss"] < 0:
            raise ValueError("a loss below zero")


def run_alone(harness: WorkerPoolHarness, fn: Any, **options: Any) -> Any:
    """Run `fn` on one worker without a framework; return its last frame."""
    harness.pack(fn, framework="none", **options)
    harness.start(0, 1)
    harness.until(harness.has_all_exited)
    return harness.frames[-1][1] if harness.frames else None


# --- rounds ---------------------------------------------------------------------------------------


def test_four_workers_form_a_group_and_return(harness: WorkerPoolHarness) -> None:
    harness.pack(join_group)
    harness.start(0, 4)
    harness.until(harness.has_all_exited)
    assert set(harness.exits.values()) == {"exited with code 0"}
    assert pickle.loads(harness.last_frames(WorkerReturned)[0].pickled_value) == 4.0
    assert harness.last_frames(WorkerReturned)[1].pickled_value == b""


def test_killed_worker_is_reported_and_the_next_round_starts(
    harness: WorkerPoolHarness,
) -> None:
    harness.pack(join_group_and_wait)
    for number in range(4):
        harness.start(number, 4)
        harness.until(harness.has_all_running)
        pid = harness.worker_pool._workers[number % 4].pid
        assert pid is not None
        process.kill(pid)
        harness.until(lambda number=number: number % 4 in harness.exits)  # type: ignore[misc]
        assert (
            harness.exits[number % 4] == "was killed by SIGKILL"
        )  # the other workers may have failed as well
        harness.worker_pool.kill_workers()
        harness.until(harness.has_all_exited)


def test_killed_fork_server_ends_its_workers_and_is_replaced(
    harness: WorkerPoolHarness, fork_servers: ForkServerPool
) -> None:
    harness.pack(join_group_and_wait)
    harness.start(0, 2)
    harness.until(harness.has_all_running)
    first = harness.worker_pool._launcher._fork_server
    assert first is not None
    process.kill(first.pid)
    harness.until(harness.has_all_exited)
    result = {"was killed by SIGKILL", "died with the process it was forked from"}
    assert set(harness.exits.values()) <= result
    harness.start(1, 2)
    harness.until(harness.has_all_running)
    assert harness.worker_pool._launcher._fork_server is not first


def test_stop_kills_grandchildren(harness: WorkerPoolHarness) -> None:
    harness.pack(fork_and_wait, framework="none")
    harness.start(0, 2)
    harness.until(harness.has_all_running)
    groups = [child.pid for child in harness.worker_pool._workers.values() if child.pid]
    harness.until(lambda: sum(map(members_of, groups)) == 6)
    harness.worker_pool.kill_workers()
    harness.until(harness.has_all_exited)
    harness.until(lambda: sum(map(members_of, groups)) == 0)


def test_worker_stopped_before_its_fork_is_not_started(harness: WorkerPoolHarness) -> None:
    harness.pack(join_group_and_wait)
    harness.start(0, 2)
    harness.worker_pool.kill_workers()
    harness.until(harness.has_all_exited)
    assert not harness.worker_pool.has_workers


# --- worker output --------------------------------------------------------------------------------


def test_last_lines_of_a_killed_worker_are_kept_in_order(harness: WorkerPoolHarness) -> None:
    run_alone(harness, print_and_die)
    texts = [line["text"] for line in harness.lines() if "text" in line]
    assert texts == [*(f"line {number}" for number in range(2000)), "no newline"]
    assert harness.exits == {0: "was killed by SIGKILL"}


def test_exception_contains_its_traceback(harness: WorkerPoolHarness) -> None:
    raised = run_alone(harness, raise_it)
    assert isinstance(raised, WorkerRaised)
    assert pickle.loads(raised.pickled_exception).args == ("weights",)
    assert raised.traceback_text.splitlines()[1].endswith("in raise_it")
    assert harness.exits == {0: "exited with code 1"}


def test_system_exit_of_a_worker_is_a_failure(harness: WorkerPoolHarness) -> None:
    raised = run_alone(harness, exit_cleanly)
    assert isinstance(raised, WorkerRaised)
    assert "SystemExit: 0" in raised.traceback_text


def return_tensors() -> Any:
    import torch

    return {"weights": torch.ones(1)}


def return_a_lock() -> Any:
    import threading

    return threading.Lock()


@pytest.mark.parametrize(
    ("fn", "expected"), [(return_tensors, "torch tensors"), (return_a_lock, "a lock, cannot be")]
)
def test_invalid_return_value_is_reported(
    harness: WorkerPoolHarness, fn: Any, expected: str
) -> None:
    raised = run_alone(harness, fn)
    assert isinstance(raised, WorkerRaised)
    assert expected in raised.traceback_text


def test_environment_variables_are_set_before_imports(
    harness: WorkerPoolHarness,
) -> None:
    rank, variable, where, _ = pickle.loads(
        run_alone(harness, return_location, env_vars={"MINE": "yes"}).pickled_value
    )
    assert (rank, variable, where) == (
        "0",
        "yes",
        str(harness.folder / "scratch" / "work" / "test"),
    )


def test_workers_without_a_fork_server_are_started_as_new_interpreters(
    harness: WorkerPoolHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_FORK", "never")
    harness.pack(return_location, framework="none", env_vars={"MINE": "yes"})
    harness.start(0, 2)
    harness.until(harness.has_all_exited)
    assert set(harness.exits.values()) == {"exited with code 0"}
    assert pickle.loads(harness.last_frames(WorkerReturned)[0].pickled_value)[:2] == ("0", "yes")
    assert isinstance(harness.worker_pool, ProcessWorkerPool)
    assert harness.worker_pool._launcher._fork_server is None


def test_modified_code_bundle_is_rejected_by_every_worker(harness: WorkerPoolHarness) -> None:
    harness.pack(raise_it, framework="none")
    assert harness.spec is not None
    harness.until(lambda: harness.worker_pool._launcher._runtime_key is not None)
    copy = next((harness.folder / "scratch" / "code_bundle").iterdir())
    copy.write_bytes(copy.read_bytes() + b"x")
    harness.start(0, 1)
    harness.until(harness.has_all_exited)
    assert "IntegrityError" in harness.last_frames(WorkerRaised)[0].traceback_text


# --- callbacks ------------------------------------------------------------------------------------


def test_callbacks_run_in_a_separate_process(harness: WorkerPoolHarness) -> None:
    objects = {"callbacks": [PrintingCallback()], "run_context": "ctx"}
    harness.pack(raise_it, framework="none", objects=objects)
    assert harness.spec is not None
    hello = SidecarInit(
        storage_url=harness.spec.storage_url,
        code_bundle=harness.spec.code_bundle,
        secret=SECRET,
        run_id=RUN_ID,
    )
    callback_runner = ProcessCallbackRunner(
        hello, partial(harness.worker_pool.start_sidecar, "callbacks")
    )
    callback_runner.send_report([pickle_free(b'{"loss":1}')], None)
    harness.until(lambda: callback_runner.is_idle)
    assert callback_runner.user_code_error() is None
    callback_runner.send_report([pickle_free(b'{"loss":-1}')], None)
    harness.until(lambda: callback_runner.user_code_error() is not None)
    assert "a loss below zero" in str(callback_runner.user_code_error())
    callback_runner.close()
    harness.until(lambda: harness.worker_pool.live_process_count == 0)
    assert harness.lines()[0]["text"] == "received ctx [{'loss': 1}] None"


# --- end of the agent -----------------------------------------------------------------------------


def test_all_processes_of_a_node_end_with_its_agent(tmp_path: Path) -> None:
    """Includes child processes of workers, although the agent was killed."""
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from pathlib import Path
        from spotfit.fork_server.fork_client import ForkServerPool
        from tests.live.worker_pool_harness import WorkerPoolHarness
        from tests.live.test_processes import fork_and_wait
        harness = WorkerPoolHarness(Path({str(tmp_path)!r}), ForkServerPool())
        harness.pack(fork_and_wait, framework="none")
        harness.start(0, 2)
        harness.until(harness.has_all_running)
        print("up", flush=True)
        harness.until(lambda: False, within_s=60)
    """
    agent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert agent.stdout is not None
    with agent.stdout:
        assert agent.stdout.readline() == b"up\n"
        until(lambda: len(process.session_members(agent.pid)) == 8)
        agent.kill()
        agent.wait()
        until(lambda: process.session_members(agent.pid) == [])


def members_of(group: int) -> int:
    """Return the running processes of a process group."""
    session = os.getsid(0)
    return sum(os.getpgid(pid) == group for pid in process.session_members(session))


def until(done: Any) -> None:
    for _ in range(1000):
        if done():
            return
        signal.sigtimedwait([], 0.01)
    raise AssertionError("it never came")


def pickle_free(body: bytes) -> Any:
    import msgspec

    return msgspec.Raw(body)
