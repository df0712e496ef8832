"""What a worker brings home, and how its process ends."""

import atexit
import logging
import os
import pickle
import threading
from typing import NoReturn

import pytest

from spotfit.core.errors import ShippingError
from spotfit.host import log
from spotfit.worker import main
from tests.unit.worker.agent_end import AgentEnd, start


def test_plain_values_come_home_as_they_are() -> None:
    assert pickle.loads(main._pickled({"accuracy": 0.97})) == {"accuracy": 0.97}


def test_tensors_stay_where_they_are() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="torch tensors"):
        main._pickled({"nested": [torch.ones(1)]})


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(ShippingError, match="a lock, cannot be pickled"):
        main._pickled(threading.Lock())


def test_a_value_too_big_to_bring_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_LARGEST_RESULT_BYTES", 1024)
    assert main._pickled(b"x" * 900)
    with pytest.raises(ShippingError, match=r"takes 1\.\d KiB; 1\.0 KiB is the most") as refused:
        main._pickled(b"x" * 1100)
    assert "checkpoint" in refused.value.do


@pytest.mark.parametrize("level", ["DEBUG", "ERROR"])
def test_the_run_s_level_is_ours_and_leaves_the_user_s_own_log_alone(
    level: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def leave_after_a_word(_name: str) -> NoReturn:
        logging.getLogger("mine").info("the user's word")
        logging.getLogger("mine").debug("too much")
        log.warning("our.word")
        os._exit(0)

    agent = AgentEnd()
    agent.say(start(log_level=level))
    child = os.fork()
    if child == 0:
        logging.root.handlers.clear()
        main.open_framework = leave_after_a_word  # type: ignore[assignment, attr-defined]
        main.main(agent.talk._wire.fileno())
    os.waitpid(child, 0)
    agent.close()
    said = capfd.readouterr().err
    assert "INFO mine: the user's word" in said
    assert "too much" not in said
    assert ("our.word" in said) == (level == "DEBUG")


def ended(code: int, leave: object) -> tuple[int, bytes]:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        atexit._clear()
        atexit.register(os.write, writes, b"flushed ")
        main.end(code, lambda: leave(writes))  # type: ignore[operator]
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def test_a_good_end_leaves_the_group_and_lets_libraries_flush() -> None:
    assert ended(0, lambda pipe: os.write(pipe, b"left ")) == (0, b"left flushed ")


def test_after_a_failure_nobody_waits_for_the_group() -> None:
    assert ended(1, lambda pipe: os.write(pipe, b"left ")) == (1, b"flushed ")


def test_a_group_that_breaks_on_leaving_ends_it_all_the_same() -> None:
    def breaks(_: int) -> None:
        raise RuntimeError("the group is broken")

    assert ended(0, breaks)[0] == 0


def test_what_hangs_at_the_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_LAST_WORDS_S", 0.01)
    monkeypatch.setenv("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S", "0.01")
    reads, _writes = os.pipe()
    assert ended(0, lambda _: os.read(reads, 1))[0] == 0
