"""The process that validates: the user's function is called, and whatever it does is told."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.core.codec import decoder, encode
from spotfit.core.errors import MachineError
from spotfit.frameworks.devices import VISIBLE
from spotfit.host import frames
from spotfit.model.assessment import Assessment, Verdict
from spotfit.ship.environment import RuntimeEnv
from spotfit.ship.luggage import pack
from spotfit.ship.sign import RunKey
from spotfit.store.api import Store
from spotfit.store.budget import PATIENT, Budget
from spotfit.store.opening import open_store
from spotfit.testing.builders import RUN
from spotfit.worker import validation
from spotfit.worker.validation import assess
from tests.unit.checkpoint.kept import part, saved

KEY = RunKey(b"k" * 32, RUN)


def read(checkpoint: Any, **kwargs: Any) -> dict[str, Any]:
    with checkpoint.as_directory() as folder:
        return {"model": Path(folder, "model").read_text(), **kwargs}


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What moving in changes is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(VISIBLE, "6,7")
    monkeypatch.setenv("COLOUR", "red")


def a_task(
    tmp_path: Path, fn: Callable[..., Any] = read, usual: Any = None, **asked: Any
) -> Assessment:
    store = open_store(str(tmp_path / "run"))
    saved(store, tmp_path / "c1", part("c1"), model="w")
    packed = pack(
        lambda: None,
        None,
        runtime_env=RuntimeEnv(env_vars={"COLOUR": "blue"}),
        key=KEY,
        store=store,
        objects={"validation": (fn, usual or {})},
    )
    luggage = msgspec.to_builtins(packed)
    usual_task: dict[str, Any] = {"checkpoint": "c1", "scratch": str(tmp_path)}
    return Assessment(store.url, luggage, KEY.to_text(), RUN, **{**usual_task, **asked})


def test_what_the_report_says_goes_on_top_of_what_the_trainer_says(tmp_path: Path) -> None:
    usual = {"a": 1, "b": float("nan")}
    task = a_task(tmp_path, usual=usual, kwargs={"b": 2, "c": {"__float__": "inf"}})
    assert assess(task) == Verdict({"model": "w", "a": 1, "b": 2, "c": {"__float__": "inf"}})


def test_it_insists_on_the_checkpoint_for_as_long_as_a_worker_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Budget | None] = []

    def opening(url: str, budget: Budget | None = None) -> Store:
        opened.append(budget)
        return open_store(url, budget)

    task = a_task(tmp_path)
    monkeypatch.setattr("spotfit.worker.validation.open_store", opening)
    assert assess(task).metrics == {"model": "w"}
    assert opened == [PATIENT]


def test_it_runs_in_the_environment_of_the_workers(tmp_path: Path) -> None:
    def look(checkpoint: Any) -> dict[str, Any]:
        return {"colour": os.environ["COLOUR"], "cards": os.environ[VISIBLE]}

    assert assess(a_task(tmp_path, look)) == Verdict({"colour": "blue", "cards": ""})


def test_it_sees_the_cards_it_was_given(tmp_path: Path) -> None:
    def look(checkpoint: Any) -> dict[str, Any]:
        return {"cards": os.environ[VISIBLE]}

    assert assess(a_task(tmp_path, look, devices=("cuda:1",))) == Verdict({"cards": "7"})


def raising(checkpoint: Any) -> dict[str, Any]:
    raise ArithmeticError("nothing there")


def leaving(checkpoint: Any) -> dict[str, Any]:
    sys.exit(0)


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (raising, "ArithmeticError: nothing there"),
        (leaving, "SystemExit: 0"),
        (lambda _: [1, 2], "must return a dictionary of metrics, not a list"),
        (lambda _: {"acc": object()}, "metrics['acc'] cannot be reported"),
    ],
    ids=["raises", "leaves", "no dictionary", "no metrics"],
)
def test_whatever_goes_wrong_in_it_is_its_failure(tmp_path: Path, fn: Any, told: str) -> None:
    verdict = assess(a_task(tmp_path, fn))
    assert (verdict.metrics, verdict.again) == (None, False)
    assert told in verdict.told


def test_a_traceback_begins_in_the_user_s_code(tmp_path: Path) -> None:
    told = assess(a_task(tmp_path, raising)).told
    assert "in raising" in told
    assert "worker/validation.py" not in told


def test_what_keeps_it_from_beginning_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise MachineError("The disk is full.", do="Make room.")

    task = a_task(tmp_path)
    monkeypatch.setattr(validation, "move_in", full)
    verdict = assess(task)
    assert verdict.again
    assert "The disk is full." in verdict.told


def test_luggage_that_was_changed_is_not_opened(tmp_path: Path) -> None:
    task = msgspec.structs.replace(a_task(tmp_path), secret=RunKey(b"x" * 32, RUN).to_text())
    verdict = assess(task)
    assert (verdict.metrics, verdict.again) == (None, False)
    assert "was changed, or sealed with the key of another run" in verdict.told


def test_the_process_reads_one_frame_tells_one_and_ends(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    frames.write(ours, encode(a_task(tmp_path)))
    child = os.fork()
    if child == 0:
        ours.close()
        validation.main(theirs.fileno())
    theirs.close()
    body = frames.read(ours)
    assert body is not None
    assert decoder(Verdict).decode(body) == Verdict({"model": "w"})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ours.close()


def test_without_an_agent_there_is_nothing_to_do() -> None:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        validation.main(theirs.fileno())
    ours.close()
    theirs.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
