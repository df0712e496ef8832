"""A user's exception as data: the traceback is theirs, and what cannot be pickled is only told."""

import pickle

from spotfit.worker import crash


class Stubborn(Exception):
    """Pickles, but cannot be made again."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class Locked(Exception):
    def __reduce__(self) -> str:
        raise RuntimeError("not to be pickled")


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def test_an_exception_comes_back_as_itself() -> None:
    raised = crash.as_raised(caught(KeyError("weights")))
    assert pickle.loads(raised.value).args == ("weights",)
    assert raised.told.endswith("KeyError: 'weights'")
    assert "in caught" in raised.told


def test_one_that_cannot_be_made_again_is_only_told() -> None:
    for error in (Stubborn(code=1), Locked("door")):
        raised = crash.as_raised(caught(error))
        assert raised.value == b""
        assert type(error).__name__ in raised.told


def test_causes_are_told() -> None:
    try:
        try:
            raise ValueError("first")
        except ValueError as first:
            raise RuntimeError("second") from first
    except RuntimeError as error:
        told = crash.told(error)
    assert told.index("ValueError: first") < told.index("RuntimeError: second")


def test_frames_of_ours_above_the_user_s_are_left_out() -> None:
    source = compile("def ours(fn):\n    fn()\n", crash._OURS + "worker/main.py", "exec")
    scope: dict[str, object] = {}
    exec(source, scope)

    def theirs() -> None:
        raise ValueError("theirs")

    try:
        scope["ours"](theirs)  # type: ignore[operator]
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
        told = crash.told(error)
    assert "worker/main.py" not in told
    assert "in theirs" in told


def test_an_error_of_ours_keeps_its_traceback() -> None:
    try:
        crash._from_user_code(1)  # type: ignore[arg-type]
    except AttributeError as error:
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
        assert "crash.py" in crash.told(error)
