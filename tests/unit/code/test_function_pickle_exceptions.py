"""A user's exception as data: the traceback is theirs, and what cannot be pickled is only told."""

import pickle
from threading import Lock
from typing import Any

import pytest

from spotfit.code import function_pickle
from spotfit.core.errors import ConfigError, ShippingError
from spotfit.model.events import FailureCause


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
    raised = function_pickle.to_failure_message(caught(KeyError("weights")))
    assert pickle.loads(raised.pickled_exception).args == ("weights",)
    assert raised.traceback_text.endswith("KeyError: 'weights'")
    assert "in throw" in raised.traceback_text


def test_one_that_no_call_can_make_again_comes_back_without_one() -> None:
    raised = function_pickle.to_failure_message(caught(StubbornError(code=1)))
    again = pickle.loads(raised.pickled_exception)
    assert (type(again), str(again), again.code) == (StubbornError, "code 1", 1)
    again = pickle.loads(
        function_pickle.to_failure_message(caught(LockedError("door"))).pickled_exception
    )
    assert (type(again), again.args) == (LockedError, ("door",))


def test_what_cannot_travel_with_it_is_left_behind() -> None:
    again = pickle.loads(
        function_pickle.to_failure_message(
            caught(StubbornError(code=2, door=Lock()))
        ).pickled_exception
    )
    assert (again.code, hasattr(again, "door")) == (2, False)


@pytest.mark.parametrize("error", [WordlessError(Lock()), ValueError(Lock())])
def test_one_that_is_nothing_without_what_it_lost_is_only_told(error: Exception) -> None:
    raised = function_pickle.to_failure_message(caught(error))
    assert raised.pickled_exception == b""
    assert type(error).__name__ in raised.traceback_text


def test_causes_are_told() -> None:
    second = RuntimeError("second")
    second.__cause__ = caught(ValueError("first"))
    told = function_pickle.format_traceback(caught(second))
    assert told.index("ValueError: first") < told.index("RuntimeError: second")


def test_frames_of_ours_above_the_user_s_are_left_out() -> None:
    source = compile(
        "def ours(fn):\n    fn()\n", function_pickle._PACKAGE_PREFIX + "worker/main.py", "exec"
    )
    scope: dict[str, Any] = {}
    exec(source, scope)  # noqa: S102 - a function that looks like one of ours

    def theirs() -> None:
        raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs") as raised:
        scope["ours"](theirs)
    told = function_pickle.format_traceback(from_below_the_test(raised.value))
    assert "worker/main.py" not in told
    assert "in theirs" in told


def test_an_error_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(AttributeError) as raised:
        function_pickle._skip_own_frames(1)  # type: ignore[arg-type]
    assert "function_pickle.py" in function_pickle.format_traceback(
        from_below_the_test(raised.value)
    )


def code_of_ours(source: str) -> dict[str, Any]:
    """Define functions as if they were in a module of spotfit."""
    scope: dict[str, Any] = {}
    code = compile(source, function_pickle._PACKAGE_PREFIX + "worker/session.py", "exec")
    exec(code, scope)  # noqa: S102 - functions that look like ours
    return scope


def test_an_error_of_ours_shows_only_the_user_s_frames() -> None:
    reject = code_of_ours("def reject(error):\n    raise error\n")["reject"]

    def theirs() -> None:
        reject(ConfigError("no tensors"))

    with pytest.raises(ConfigError) as raised:
        theirs()
    text = function_pickle.format_traceback(from_below_the_test(raised.value))
    assert "in theirs" in text
    assert "session.py" not in text
    assert text.endswith("ConfigError: no tensors")


def test_the_cause_of_an_error_of_ours_is_shown_if_it_is_outside_of_spotfit() -> None:
    scope = code_of_ours(
        "def reject(call, error):\n"
        "    try:\n"
        "        call()\n"
        "    except Exception as cause:\n"
        "        raise error from cause\n"
        "def inner():\n"
        "    raise TypeError('detected here')\n"
    )

    def theirs() -> None:
        raise TypeError("raised by the user")

    def text_of(call: Any) -> str:
        with pytest.raises(ConfigError) as raised:
            scope["reject"](call, ConfigError("no tensors"))
        return function_pickle.format_traceback(from_below_the_test(raised.value))

    assert text_of(scope["inner"]) == "spotfit.core.errors.ConfigError: no tensors"
    assert "raised by the user" in text_of(theirs)


def test_an_error_of_ours_outside_of_user_code_is_shown_without_frames() -> None:
    reject = code_of_ours("def reject(error):\n    raise error\n")["reject"]
    with pytest.raises(ConfigError) as raised:
        reject(ConfigError("no GPU", do="Use the CPU."))
    text = function_pickle.format_traceback(from_below_the_test(raised.value))
    assert text == "spotfit.core.errors.ConfigError: no GPU\n  What to do: Use the CPU."


def from_below_the_test(error: BaseException) -> BaseException:
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)


def test_what_came_before_the_function_is_told_with_whose_fault_it_was() -> None:
    mine = function_pickle.to_setup_failure_message(
        caught(ShippingError("there is no module 'his'"))
    )
    assert (mine.cause, mine.is_permanent) == (FailureCause.WORKER, True)
    theirs = function_pickle.to_setup_failure_message(
        caught(OSError(28, "No space left on device"))
    )
    assert (theirs.cause, theirs.is_permanent) == (FailureCause.PLATFORM, False)
    assert "No space left" in theirs.traceback_text


def test_what_no_other_try_would_change_is_told_as_that() -> None:
    refused = function_pickle.to_failure_message(
        caught(ConfigError("own= ties it", retryable=False))
    )
    assert (refused.cause, refused.is_permanent) == (None, True)
    assert not function_pickle.to_failure_message(caught(ConfigError("a metric"))).is_permanent
