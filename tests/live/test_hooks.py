"""Backend hooks call workers before, during and after the function; errors end the run."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit.backend import Backend, BackendConfig
from spotfit.model.events import FailureCause
from spotfit.store.local import atomic_write
from tests.live.cloud import LiveTestCloud

Config = dict[str, Any]


def rank() -> int:
    return spotfit.get_context().get_world_rank()


def describe_worker(greeting: str, *, mark: str = "") -> tuple[str, int, int]:
    """Runs on workers."""
    os.environ["GREETED"] = greeting
    return f"{greeting}{mark}", rank(), os.getpid()


def raise_lookup_error(why: str) -> None:
    raise LookupError(f"{why} on rank {rank()}")


@dataclass
class HookRecorder(BackendConfig):
    """Records the calls of hooks in a file, and names the hook that raises."""

    path: str
    failing_hook: str = ""

    @property
    def backend_cls(self) -> type[Backend]:
        return RecordingBackend

    def write(self, *call: Any) -> None:
        with Path(self.path).open("a") as path:
            path.write(json.dumps(call) + "\n")

    def read(self) -> list[list[Any]]:
        return [json.loads(line) for line in Path(self.path).read_text().splitlines()]


class RecordingBackend(Backend):
    """Calls its workers in every hook."""

    def __init__(self) -> None:
        self.attempts = 0

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        self.attempts += 1
        result = worker_group.execute(describe_worker, "hello", mark="!")
        assert len({pid for _, _, pid in result}) == len(worker_group)
        assert os.getpid() not in {pid for _, _, pid in result}
        backend_config.write("start", self.attempts, [[what, of] for what, of, _ in result])
        backend_config.write("resources", worker_group.get_resources_per_worker())
        if backend_config.failing_hook == "on_start":
            worker_group.execute_single(1, raise_lookup_error, "no port")

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        futures = worker_group.execute_async(describe_worker, "ready")
        backend_config.write("training", [future.result()[:2] for future in futures])

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        backend_config.write("shutdown", self.attempts)
        result = worker_group.execute_single(len(worker_group) - 1, describe_worker, "bye")
        backend_config.write("said", result[:2])
        if backend_config.failing_hook == "on_shutdown":
            raise ArithmeticError("lost count")


def trainer(
    cloud: LiveTestCloud, fn: Callable[..., Any], backend: BackendConfig, **how: Any
) -> Any:
    made = cloud.trainer(fn, **how)
    made.backend_config = backend
    return made


def test_hooks_call_the_workers_before_and_after_the_function(cloud: LiveTestCloud) -> None:
    def train() -> tuple[str, int]:
        return os.environ["GREETED"], os.getpid()

    recorder = HookRecorder(str(cloud.folder / "notes"))
    result = trainer(cloud, train, recorder, workers=2, nodes=2).fit()
    assert result.return_value[0] == "ready"
    assert recorder.read() == [
        ["start", 1, [["hello!", 0], ["hello!", 1]]],
        ["resources", {"CPU": 1}],
        ["training", [["ready", 0], ["ready", 1]]],
        ["shutdown", 1],
        ["said", ["bye", 1]],
    ]


def test_every_attempt_calls_its_hooks_and_lost_workers_are_not_errors(
    cloud: LiveTestCloud,
) -> None:
    def train(config: Config) -> str:
        mark = Path(config["marks"], "failed once")
        if not mark.exists() and rank() == 1:
            mark.touch()
            raise ValueError("no data yet")
        spotfit.collective.barrier()
        return "done"

    recorder = HookRecorder(str(cloud.folder / "notes"))
    result = trainer(cloud, train, recorder, workers=2, max_failures=1).fit()
    assert result.return_value == "done"
    hooks = [call[:2] for call in recorder.read() if call[0] in ("start", "shutdown", "said")]
    assert hooks == [
        ["start", 1],
        ["shutdown", 1],
        ["start", 2],
        ["shutdown", 2],
        ["said", ["bye", 1]],
    ]
    assert [closed.cause for closed in cloud.rounds_closed()] == [FailureCause.WORKER]


@pytest.mark.parametrize(
    ("hook", "cause"),
    [
        ("on_start", "LookupError: no port on rank 1"),
        ("on_shutdown", "ArithmeticError: lost count"),
    ],
)
def test_exception_of_a_hook_ends_the_run(cloud: LiveTestCloud, hook: str, cause: str) -> None:
    recorder = HookRecorder(str(cloud.folder / "notes"), failing_hook=hook)
    with pytest.raises(spotfit.ControllerError, match=cause) as error_info:
        trainer(cloud, lambda: None, recorder, workers=2, max_failures=5).fit()
    kind = LookupError if hook == "on_start" else ArithmeticError
    assert isinstance(error_info.value.controller_failure, kind)
    assert len(cloud.rounds_opened()) == 1


class WatchingBackend(Backend):
    """Calls workers while the function runs."""

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        import threading

        def watch() -> None:
            while not Path(backend_config.path).exists():
                step = worker_group.execute_single(0, read_step)
                if step >= 3:
                    with atomic_write(Path(backend_config.path)) as part:  # others wait for it
                        part.write_text(str(step))

        threading.Thread(target=watch, daemon=True).start()


def read_step() -> int:
    return int(os.environ.get("STEPS", "0"))


class WatchConfig(HookRecorder):
    @property
    def backend_cls(self) -> type[Backend]:
        return WatchingBackend


def test_hooks_call_workers_while_the_function_blocks(
    cloud: LiveTestCloud,
) -> None:
    def train(config: Config) -> int:
        while not Path(config["page"]).exists():
            os.environ["STEPS"] = str(int(os.environ.get("STEPS", "0")) + 1)
            spotfit.collective.barrier()
            time.sleep(0.01)
        return int(Path(config["page"]).read_text())

    path = str(cloud.folder / "seen")
    run = trainer(cloud, train, WatchConfig(path), config={"page": path})
    assert run.fit().return_value >= 3


class FlagConfig(BackendConfig):
    """Sets a flag around the function."""

    @property
    def train_func_context(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        return flag_context


@contextlib.contextmanager
def flag_context() -> Iterator[None]:
    os.environ["FLAG"] = f"set on {rank()}"
    yield
    os.environ.pop("FLAG")


@pytest.mark.parametrize("workers", [0, 1])
def test_context_manager_surrounds_the_function(cloud: LiveTestCloud, workers: int) -> None:
    run = trainer(cloud, lambda: os.environ.get("FLAG"), FlagConfig(), workers=workers)
    assert run.fit().return_value == "set on 0"
    assert "FLAG" not in os.environ
