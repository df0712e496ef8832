"""A user's exception as data: the traceback is theirs, and what cannot be pickled is only told."""

import pickle
from threading import Lock
from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ShippingError
from spotfit.model.events import Blame
from spotfit.worker import crash


class StubbornError(Exception):
    """Pickles, but cannot be made again by a call."""

    def __init__(self, *, code: int, door: Any = None) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.door = door


class LockedError(Exception):
    def __reduce__(self) -> str:
        raise RuntimeError("not to be pickled")


class WordlessError(Exception):
    """Has no text without what cannot travel."""

    def __init__(self, door: Any) -> None:
        super().__init__()
        self.door = door

    def __str__(self) -> str:
        return f"locked: {self.door.locked()}"


def throw(error: Exception) -> None:
    raise error


def caught(error: Exception) -> Exception:
    with pytest.raises(type(error)) as raised:
        throw(error)
    return raised.value


def test_an_exception_comes_back_as_itself() -> None:
    raised = crash.as_raised(caught(KeyError("weights")))
    assert pickle.loads(raised.value).args == ("weights",)
    assert raised.told.endswith("KeyError: 'weights'")
    assert "in throw" in raised.told


def test_one_that_no_call_can_make_again_comes_back_without_one() -> None:
    raised = crash.as_raised(caught(StubbornError(code=1)))
    again = pickle.loads(raised.value)
    assert (type(again), str(again), again.code) == (StubbornError, "code 1", 1)
    again = pickle.loads(crash.as_raised(caught(LockedError("door"))).value)
    assert (type(again), again.args) == (LockedError, ("door",))


def test_what_cannot_travel_with_it_is_left_behind() -> None:
    again = pickle.loads(crash.as_raised(caught(StubbornError(code=2, door=Lock()))).value)
    assert (again.code, hasattr(again, "door")) == (2, False)


@pytest.mark.parametrize("error", [WordlessError(Lock()), ValueError(Lock())])
def test_one_that_is_nothing_without_what_it_lost_is_only_told(error: Exception) -> None:
    raised = crash.as_raised(caught(error))
    assert raised.value == b""
    assert type(error).__name__ in raised.told


def test_causes_are_told() -> None:
    second = RuntimeError("second")
    second.__cause__ = caught(ValueError("first"))
    told = crash.told(caught(second))
    assert told.index("ValueError: first") < told.index("RuntimeError: second")


def test_frames_of_ours_above_the_user_s_are_left_out() -> None:
    source = compile("def ours(fn):\n    fn()\n", crash._OURS + "worker/main.py", "exec")
    scope: dict[str, Any] = {}
    exec(source, scope)  # noqa: S102 - a function that looks like one of ours

    def theirs() -> None:
        raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs") as raised:
        scope["ours"](theirs)
    told = crash.told(from_below_the_test(raised.value))
    assert "worker/main.py" not in told
    assert "in theirs" in told


def test_an_error_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(AttributeError) as raised:
        crash._from_user_code(1)  # type: ignore[arg-type]
    assert "crash.py" in crash.told(from_below_the_test(raised.value))


def from_below_the_test(error: BaseException) -> BaseException:
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)


def test_what_came_before_the_function_is_told_with_whose_fault_it_was() -> None:
    mine = crash.unprepared(caught(ShippingError("there is no module 'his'")))
    assert (mine.blame, mine.final) == (Blame.WORKER, True)
    theirs = crash.unprepared(caught(OSError(28, "No space left on device")))
    assert (theirs.blame, theirs.final) == (Blame.PLATFORM, False)
    assert "No space left" in theirs.told


def test_what_no_other_try_would_change_is_told_as_that() -> None:
    refused = crash.as_raised(caught(ConfigError("own= ties it", may_pass=False)))
    assert (refused.blame, refused.final) == (None, True)
    assert not crash.as_raised(caught(ConfigError("a metric"))).final
