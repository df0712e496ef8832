"""What cannot travel is named by its path."""

import copyreg
import functools
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from spotfit.code.function_pickle import (
    UnpicklablePart,
    find_unpicklable_part,
    iterate_parts,
    largest_parts,
)

LOCK = threading.Lock()


def refusal(thing: Any) -> Exception | None:
    try:
        cloudpickle.dumps(thing)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return error
    return None


def told(thing: Any) -> str:
    culprit = find_unpicklable_part(thing, "train_loop", refusal)
    assert culprit is not None
    return str(culprit)


def holding(value: Any) -> Any:
    def train_loop() -> Any:
        return value

    return train_loop


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> Any:
        return self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


def test_what_can_be_pickled_has_no_culprit() -> None:
    assert find_unpicklable_part(holding([1, 2]), "train_loop", refusal) is None


def test_a_closure_is_entered() -> None:
    expected = (
        "train_loop -> closure variable 'value' -> ['lock'] -> _thread.lock cannot be pickled"
    )
    assert told(holding({"fine": 1, "lock": LOCK})) == expected


def test_a_global_is_entered_from_a_function_inside() -> None:
    def train_loop() -> Any:
        return lambda: LOCK

    assert told(train_loop) == "train_loop -> global 'LOCK' -> _thread.lock cannot be pickled"


def test_defaults_are_entered() -> None:
    def train_loop(a: int, b: Any = LOCK) -> Any:
        return a, b

    def by_name(*, c: Any = LOCK) -> Any:
        return c

    assert "train_loop -> default of 'b' -> _thread.lock" in told(train_loop)
    assert "train_loop -> default of 'c' -> _thread.lock" in told(by_name)


@pytest.mark.parametrize(
    ("thing", "path"),
    [
        (functools.partial(print, LOCK), "bound argument 0"),
        (functools.partial(print, end=LOCK), "bound argument 'end'"),
        (Holder(LOCK).method, "its object -> .value"),
        (Holder([0, LOCK]), ".value -> [1]"),
        (Slotted(LOCK), ".value"),
        (SimpleNamespace(a=1, lock=LOCK), ".lock"),
        ((1, (2, LOCK)), "[1] -> [1]"),
        ({"a" * 60: LOCK}, "['" + "a" * 36 + "…]"),
        ({LOCK: 1}, "key <_thread.lock>"),
    ],
)
def test_every_container_is_entered(thing: Any, path: str) -> None:
    assert told(thing) == f"train_loop -> {path} -> _thread.lock cannot be pickled"


def test_a_class_made_here_is_entered() -> None:
    class Local:
        lock = LOCK

    assert told(Local()) == (
        f"train_loop -> its class {Local.__qualname__} -> .lock -> _thread.lock cannot be pickled"
    )


def test_an_object_that_refuses_is_named_itself() -> None:
    culprit = find_unpicklable_part(holding([Stubborn()]), "train_loop", refusal)
    assert culprit is not None
    assert culprit.path == ("train_loop", "closure variable 'value'", "[0]")
    assert "Stubborn" in str(culprit)
    assert "I stay here" in str(culprit.error)


def test_a_circle_is_left_by_the_way_that_leads_to_the_culprit() -> None:
    inner: dict[str, Any] = {}
    outer = {"inner": inner, "lock": LOCK}
    inner["outer"] = outer
    assert told(outer) == "train_loop -> ['lock'] -> _thread.lock cannot be pickled"


def test_a_chain_without_end_is_given_up() -> None:
    chain: list[Any] = [LOCK]
    for _ in range(100):
        chain = [chain]
    culprit = find_unpicklable_part(chain, "train_loop", refusal)
    assert culprit is not None
    assert len(culprit.path) < 50


def test_parts_of_a_module_are_its_attributes() -> None:
    module = ModuleType("mine")
    vars(module)["lock"] = LOCK
    assert (".lock", LOCK) in list(iterate_parts(module))


def test_a_registered_reducer_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        copyreg.dispatch_table, Slotted, lambda slotted: (Slotted, ([slotted.value],))
    )
    assert dict(iterate_parts(Slotted(7))) == {"its value": [7]}


def test_an_unbound_closure_variable_is_passed_over() -> None:
    def train_loop() -> Any:
        return later

    assert list(iterate_parts(train_loop)) == []
    later = 1


def test_the_heaviest_come_first() -> None:
    value = {"light": b"1", "heavy": b"1" * 100, "middle": b"1" * 10}
    assert largest_parts(value, len, count=2) == [("['heavy']", 100), ("['middle']", 10)]


def test_a_culprit_reads_as_a_path() -> None:
    culprit = UnpicklablePart(("f", "global 'g'"), LOCK, TypeError("no"))
    assert str(culprit) == "f -> global 'g' -> _thread.lock cannot be pickled"
