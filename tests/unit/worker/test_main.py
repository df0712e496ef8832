"""The worker program: return values, log levels and the exit of the process."""

import atexit
import dataclasses
import io
import logging
import os
import pickle
import sys
import threading
from typing import Any, NoReturn

import pytest

from spotfit.core.errors import ConfigError, ShippingError
from spotfit.core.ids import RunId
from spotfit.host import log
from spotfit.protocol.worker_agent import StartWorker
from spotfit.security.run_key import RunKey
from spotfit.worker import main
from tests.unit.worker.agent_end import FakeAgentConnection, make_start


def test_plain_values_are_pickled() -> None:
    assert pickle.loads(main._pickle_result({"accuracy": 0.97})) == {"accuracy": 0.97}


def test_a_field_of_a_returned_dataclass_has_no_default_factory() -> None:
    @dataclasses.dataclass
    class Summary:
        step: int

    returned = pickle.loads(main._pickle_result(Summary(7)))
    assert returned.step == 7
    assert dataclasses.fields(returned)[0].default_factory is dataclasses.MISSING


def test_tensors_in_a_return_value_are_rejected() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="torch tensors"):
        main._pickle_result({"nested": [torch.ones(1)]})


def test_a_return_value_that_cannot_be_pickled_is_rejected() -> None:
    with pytest.raises(ShippingError, match="a lock, cannot be pickled"):
        main._pickle_result(threading.Lock())


def test_a_return_value_that_is_too_large_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_MAX_RESULT_BYTES", 1024)
    assert main._pickle_result(b"x" * 900)
    with pytest.raises(ShippingError, match=r"has 1\.\d KiB; the limit is 1\.0 KiB") as refused:
        main._pickle_result(b"x" * 1100)
    assert "checkpoint" in refused.value.do


@pytest.mark.parametrize("level", ["DEBUG", "ERROR"])
def test_the_log_level_of_the_run_does_not_affect_user_loggers(
    level: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def log_and_exit(_name: str) -> NoReturn:
        logging.getLogger("user").info("message of the user")
        logging.getLogger("user").debug("debug of the user")
        log.warning("spotfit.event")
        os._exit(0)

    agent = FakeAgentConnection()
    agent.send(make_start(log_level=level))
    child = os.fork()
    if child == 0:
        logging.root.handlers.clear()
        main.open_framework = log_and_exit  # type: ignore[assignment, attr-defined]
        main.main(agent.connection._socket.fileno())
    os.waitpid(child, 0)
    agent.close()
    output = capfd.readouterr().err
    assert "INFO user: message of the user" in output
    assert "debug of the user" not in output
    assert ("spotfit.event" in output) == (level == "DEBUG")


@pytest.mark.parametrize(
    ("handler", "prints"),
    [
        (logging.StreamHandler(), False),
        (logging.FileHandler(os.devnull, delay=True), True),
        (None, True),
    ],
    ids=["prints itself", "writes a file", "has no handler"],
)
def test_a_record_that_a_library_prints_itself_is_not_printed_again(
    handler: logging.Handler | None, prints: bool
) -> None:
    library = logging.getLogger("a_library")
    if handler is not None:
        library.addHandler(handler)
    try:
        record = logging.LogRecord("a_library.part", logging.INFO, "", 0, "text", (), None)
        assert main._is_not_printed_yet(record) == prints
        if handler is not None:
            handler.setLevel(logging.ERROR)
            assert main._is_not_printed_yet(record)
    finally:
        library.handlers.clear()


def test_a_failure_prints_the_whole_traceback_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    class Connection:
        def send(self, _message: object) -> None:
            printed.append(capfd.readouterr().err)

    def fail(*_: object) -> NoReturn:
        raise KeyError("lr")

    monkeypatch.setattr(main, "open_store", fail)
    start = make_start(secret=RunKey(bytes(32), RunId("r")).to_text())
    assert main._run(start, Connection(), None) == 1  # type: ignore[arg-type]
    assert "in _run" in printed[0]
    assert printed[0].endswith("KeyError: 'lr'\n")


def test_a_closed_standard_error_does_not_hide_the_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    main.print_traceback(KeyError("lr"))


def exit_in_child(code: int, leave: object) -> tuple[int, bytes]:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        atexit._clear()
        atexit.register(os.write, writes, b"flushed ")
        main.exit_process(code, lambda: leave(writes))  # type: ignore[operator]
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        output = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output


def test_a_successful_exit_leaves_the_group_and_runs_exit_handlers() -> None:
    assert exit_in_child(0, lambda pipe: os.write(pipe, b"left ")) == (0, b"left flushed ")


def test_a_failed_exit_does_not_leave_the_group() -> None:
    assert exit_in_child(1, lambda pipe: os.write(pipe, b"left ")) == (1, b"flushed ")


def test_the_process_exits_if_leaving_the_group_raises() -> None:
    def fail(_: int) -> None:
        raise RuntimeError("the group is broken")

    assert exit_in_child(0, fail)[0] == 0


def test_an_exit_that_hangs_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_EXIT_TIMEOUT_S", 0.01)
    for library in ("TORCH_PROCESS_GROUP", "JAX_DISTRIBUTED"):
        monkeypatch.setenv(f"{library}_SHUTDOWN_TIMEOUT_S", "0.01")
    reads, _writes = os.pipe()
    assert exit_in_child(0, lambda _: os.read(reads, 1))[0] == 0


class GroupOfTwo:
    """A framework and the session of a group of two; records the calls."""

    def __init__(self, *, leaves_together: bool) -> None:
        self.leaves_together = leaves_together
        self.calls: list[str] = []
        self.hook_calls = self

    def form_group(self, _start: StartWorker, _all_gather: object) -> None:
        self.calls.append("group formed")

    def wait_for_phase(self, _phase: str) -> None: ...

    def serve_in_background(self) -> None: ...

    def send(self, _message: object) -> None: ...

    def call(self) -> None:
        self.calls.append("returned")

    def wait_for_uploads(self) -> None:
        self.calls.append("uploaded")

    def all_gather_bytes(self, kind: str, _value: bytes) -> None:
        self.calls.append(kind)


@pytest.mark.parametrize(
    ("leaves_together", "world_size", "waits"),
    [(True, 2, True), (True, 1, False), (False, 2, False)],
)
def test_ranks_that_leave_together_wait_for_each_other_after_their_uploads(
    leaves_together: bool, world_size: int, waits: bool
) -> None:
    group: Any = GroupOfTwo(leaves_together=leaves_together)
    start = make_start(world_size=world_size)
    main._train(start, group, connection=group, framework=group, function=group)
    expected = ["group formed", "returned", "uploaded"]
    assert group.calls == [*expected, *(["leave_group"] if waits else [])]


@pytest.mark.parametrize("cause", [ConfigError("the resumed pass is exhausted"), None])
def test_a_stop_iteration_after_a_resumed_pass_is_explained(cause: ConfigError | None) -> None:
    group: Any = GroupOfTwo(leaves_together=False)
    group.data_end_error = lambda: cause
    group.call = lambda: next(iter(()))
    with pytest.raises(StopIteration if cause is None else ConfigError) as raised:
        main._train(make_start(), group, connection=group, framework=group, function=group)
    if cause is not None:
        assert raised.value is cause
        assert isinstance(cause.__cause__, StopIteration)
