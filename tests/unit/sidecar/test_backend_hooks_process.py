"""HookDispatcher: hooks get a worker group, errors are reported unless workers are gone."""

from __future__ import annotations

import os
from typing import Any

import pytest

from spotfit.core.errors import StaleWorkerGroupError
from spotfit.frameworks.backend_config import Backend, BackendConfig
from spotfit.protocol.agent_sidecar import (
    BackendHook,
    CallWorkers,
    HookFinished,
    RunHook,
    WorkerCallResult,
    WorkersUnavailable,
)
from spotfit.security.run_key import RunKey
from spotfit.sidecar.backend_hooks_process import HookDispatcher
from spotfit.sidecar.worker_group import WorkerGroup
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID


class FakeBackend(Backend):
    """Records its hooks and runs `body`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, Any]] = []
        self.body: Any = lambda _group: None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        self.record("on_start", worker_group, backend_config)

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        self.record("on_training_start", worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        self.record("on_shutdown", worker_group, backend_config)

    def record(self, hook: str, group: WorkerGroup, config: Any) -> None:
        self.calls.append((hook, len(group), config))
        self.body(group)


class FakeConfig(BackendConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return FakeBackend


CONFIG = FakeConfig()


@pytest.fixture
def backend() -> Any:
    backend: Any = FakeBackend()
    backend.__init__()
    return backend


class HookProcess:
    """A dispatcher and the messages it has sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.dispatcher = HookDispatcher(self.sent.append, MemoryStore(), RunKey(b"k" * 32, RUN_ID))
        self.loads = 0

    def load(self) -> Any:
        self.loads += 1
        return CONFIG

    def run_hook(
        self, hook: BackendHook, round_number: int = 1, world_size: int = 2
    ) -> HookFinished:
        request = RunHook(
            hook=hook, round=round_number, world_size=world_size, resources_per_worker={"CPU": 1}
        )
        return self.dispatcher.run_hook(request, self.load)


def test_every_hook_gets_the_workers_and_the_same_config(backend: Any) -> None:
    process = HookProcess()
    for hook in ("on_start", "on_training_start", "on_shutdown"):
        assert process.run_hook(hook) == HookFinished(hook=hook, round=1)
    assert [hook for hook, _, _ in backend.calls] == [
        "on_start",
        "on_training_start",
        "on_shutdown",
    ]
    assert all((size, config) == (2, CONFIG) for _, size, config in backend.calls)
    assert process.loads == 1


def test_an_exception_of_a_hook_is_reported_and_stored(backend: Any) -> None:
    backend.body = lambda _group: os.environ["NO_SUCH"]
    finished = HookProcess().run_hook("on_start")
    assert finished.traceback_text is not None
    assert "KeyError: 'NO_SUCH'" in finished.traceback_text
    assert finished.pickle_key is not None


def test_system_exit_in_a_hook_is_an_error(backend: Any) -> None:
    backend.body = lambda _group: exit(3)
    assert "SystemExit: 3" in (HookProcess().run_hook("on_start").traceback_text or "")


def test_a_config_that_cannot_be_loaded_is_an_error(backend: Any) -> None:
    def load() -> Any:
        raise ImportError("no module")

    finished = HookProcess().dispatcher.run_hook(
        RunHook(hook="on_start", round=1, world_size=2), load
    )
    assert "ImportError: no module" in (finished.traceback_text or "")


def test_results_reach_the_hook_that_waits(backend: Any) -> None:
    process = HookProcess()

    def call(group: WorkerGroup) -> None:
        future = group.execute_single_async(0, len, "abc")
        call = process.sent[-1]
        assert isinstance(call, CallWorkers)
        process.dispatcher.on_message(
            WorkerCallResult(
                round=call.round,
                rank=0,
                call_id=call.call_id,
                pickled_value=b"",
                traceback_text="Traceback\nValueError: no",
            )
        )
        future.result(5)

    backend.body = call
    assert "ValueError: no" in (process.run_hook("on_start").traceback_text or "")


# --- lost workers --------------------------------------------------------------------------------


def call(group: WorkerGroup) -> None:
    group.execute(len, "abc")


def wrap_error(group: WorkerGroup) -> None:
    try:
        call(group)
    except StaleWorkerGroupError as gone:
        raise RuntimeError("cleanup failed") from gone


def raise_own_error(_group: WorkerGroup) -> None:
    raise ArithmeticError("lost count")


@pytest.mark.parametrize(
    ("hook", "body", "is_error"),
    [
        ("on_start", call, False),
        ("on_start", raise_own_error, False),
        ("on_training_start", raise_own_error, False),
        ("on_shutdown", call, False),
        ("on_shutdown", wrap_error, False),
        ("on_shutdown", raise_own_error, True),
    ],
)
def test_errors_caused_by_lost_workers_are_not_reported(
    backend: Any, hook: BackendHook, body: Any, is_error: bool
) -> None:
    """Of hooks in a lost round, only on_shutdown reports errors that have another cause."""
    process = HookProcess()
    process.dispatcher.on_message(WorkersUnavailable(round=1))
    backend.body = body
    assert (process.run_hook(hook).traceback_text is not None) == is_error
    assert process.sent == [], "no worker was called"


def test_the_next_round_has_workers_again(backend: Any) -> None:
    process = HookProcess()
    process.dispatcher.on_message(WorkersUnavailable(round=1))
    backend.body = lambda group: group.execute_async(len, "abc")
    assert process.run_hook("on_start", round_number=2).traceback_text is None
    assert [call.round for call in process.sent] == [2]
