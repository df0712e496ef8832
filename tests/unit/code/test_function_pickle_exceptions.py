"""User exceptions as messages: pickled where possible, with the traceback of user code."""

import pickle
from threading import Lock
from typing import Any

import pytest

from spotfit.code import function_pickle
from spotfit.core.errors import ConfigError, ShippingError
from spotfit.model.events import FailureCause


class KeywordOnlyError(Exception):
    """Cannot be constructed from `args`, since its parameters are keyword-only."""

    def __init__(self, *, code: int, lock: Any = None) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.lock = lock


class LockedError(Exception):
    def __reduce__(self) -> str:
        raise RuntimeError("not to be pickled")


class LockedTextError(Exception):
    """Its text requires an attribute that cannot be pickled."""

    def __init__(self, lock: Any) -> None:
        super().__init__()
        self.lock = lock

    def __str__(self) -> str:
        return f"locked: {self.lock.locked()}"


def raise_error(error: Exception) -> None:
    raise error


def raised_error(error: Exception) -> Exception:
    with pytest.raises(type(error)) as raised:
        raise_error(error)
    return raised.value


def test_exception_is_pickled_with_its_arguments() -> None:
    raised = function_pickle.to_failure_message(raised_error(KeyError("weights")))
    assert pickle.loads(raised.pickled_exception).args == ("weights",)
    assert raised.traceback_text.endswith("KeyError: 'weights'")
    assert "in raise_error" in raised.traceback_text


def test_exception_is_restored_without_calling_its_constructor() -> None:
    raised = function_pickle.to_failure_message(raised_error(KeywordOnlyError(code=1)))
    loaded = pickle.loads(raised.pickled_exception)
    assert (type(loaded), str(loaded), loaded.code) == (KeywordOnlyError, "code 1", 1)
    loaded = pickle.loads(
        function_pickle.to_failure_message(raised_error(LockedError("text"))).pickled_exception
    )
    assert (type(loaded), loaded.args) == (LockedError, ("text",))


def test_unpicklable_attributes_are_removed() -> None:
    loaded = pickle.loads(
        function_pickle.to_failure_message(
            raised_error(KeywordOnlyError(code=2, lock=Lock()))
        ).pickled_exception
    )
    assert (loaded.code, hasattr(loaded, "lock")) == (2, False)


@pytest.mark.parametrize("error", [LockedTextError(Lock()), ValueError(Lock())])
def test_exception_that_cannot_be_pickled_has_only_a_traceback(error: Exception) -> None:
    raised = function_pickle.to_failure_message(raised_error(error))
    assert raised.pickled_exception == b""
    assert type(error).__name__ in raised.traceback_text


def test_traceback_contains_the_cause() -> None:
    second = RuntimeError("second")
    second.__cause__ = raised_error(ValueError("first"))
    text = function_pickle.format_traceback(raised_error(second))
    assert text.index("ValueError: first") < text.index("RuntimeError: second")


def test_frames_of_spotfit_above_user_code_are_removed() -> None:
    source = compile(
        "def call(fn):\n    fn()\n", function_pickle._PACKAGE_PREFIX + "worker/main.py", "exec"
    )
    scope: dict[str, Any] = {}
    exec(source, scope)  # noqa: S102 - a function that looks like one of spotfit

    def user_function() -> None:
        raise ValueError("user error")

    with pytest.raises(ValueError, match="user error") as raised:
        scope["call"](user_function)
    text = function_pickle.format_traceback(without_first_frame(raised.value))
    assert "worker/main.py" not in text
    assert "in user_function" in text


def test_error_in_spotfit_keeps_its_traceback() -> None:
    with pytest.raises(AttributeError) as raised:
        function_pickle._skip_own_frames(1)  # type: ignore[arg-type]
    assert "function_pickle.py" in function_pickle.format_traceback(
        without_first_frame(raised.value)
    )


def spotfit_function_scope(source: str) -> dict[str, Any]:
    """Define functions as if they were in a module of spotfit."""
    scope: dict[str, Any] = {}
    code = compile(source, function_pickle._PACKAGE_PREFIX + "worker/session.py", "exec")
    exec(code, scope)  # noqa: S102 - functions that seem to be of spotfit
    return scope


def test_error_of_spotfit_shows_only_frames_of_the_user() -> None:
    reject = spotfit_function_scope("def reject(error):\n    raise error\n")["reject"]

    def user_function() -> None:
        reject(ConfigError("no tensors"))

    with pytest.raises(ConfigError) as raised:
        user_function()
    text = function_pickle.format_traceback(without_first_frame(raised.value))
    assert "in user_function" in text
    assert "session.py" not in text
    assert text.endswith("ConfigError: no tensors")


def test_cause_of_an_error_of_spotfit_is_shown_if_it_is_outside_of_spotfit() -> None:
    scope = spotfit_function_scope(
        "def reject(call, error):\n"
        "    try:\n"
        "        call()\n"
        "    except Exception as cause:\n"
        "        raise error from cause\n"
        "def inner():\n"
        "    raise TypeError('detected here')\n"
    )

    def user_function() -> None:
        raise TypeError("raised by the user")

    def text_of(call: Any) -> str:
        with pytest.raises(ConfigError) as raised:
            scope["reject"](call, ConfigError("no tensors"))
        return function_pickle.format_traceback(without_first_frame(raised.value))

    assert text_of(scope["inner"]) == "spotfit.core.errors.ConfigError: no tensors"
    assert "raised by the user" in text_of(user_function)


def test_error_of_spotfit_outside_of_user_code_is_shown_without_frames() -> None:
    reject = spotfit_function_scope("def reject(error):\n    raise error\n")["reject"]
    with pytest.raises(ConfigError) as raised:
        reject(ConfigError("no GPU", do="Use the CPU."))
    text = function_pickle.format_traceback(without_first_frame(raised.value))
    assert text == "spotfit.core.errors.ConfigError: no GPU\n  What to do: Use the CPU."


def without_first_frame(error: BaseException) -> BaseException:
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)


def test_setup_failure_has_its_cause() -> None:
    shipping_failure = function_pickle.to_setup_failure_message(
        raised_error(ShippingError("there is no module 'user_module'"))
    )
    assert (shipping_failure.cause, shipping_failure.is_permanent) == (FailureCause.WORKER, True)
    disk_failure = function_pickle.to_setup_failure_message(
        raised_error(OSError(28, "No space left on device"))
    )
    assert (disk_failure.cause, disk_failure.is_permanent) == (FailureCause.PLATFORM, False)
    assert "No space left" in disk_failure.traceback_text


def test_non_retryable_error_is_permanent() -> None:
    permanent = function_pickle.to_failure_message(
        raised_error(ConfigError("per-rank state", retryable=False))
    )
    assert (permanent.cause, permanent.is_permanent) == (None, True)
    assert not function_pickle.to_failure_message(
        raised_error(ConfigError("a metric"))
    ).is_permanent
