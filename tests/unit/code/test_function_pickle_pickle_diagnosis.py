"""The part of an object that cannot be pickled is named by its path."""

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


def pickle_error(value: Any) -> Exception | None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - any error means unpicklable
        return error
    return None


def describe_unpicklable(value: Any) -> str:
    part = find_unpicklable_part(value, "train_loop", pickle_error)
    assert part is not None
    return str(part)


def closure_with(value: Any) -> Any:
    def train_loop() -> Any:
        return value

    return train_loop


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> Any:
        return self.value


class WithSlots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class RaisesInReduce:
    def __reduce__(self) -> Any:
        raise RuntimeError("not picklable")


def test_picklable_object_has_no_unpicklable_part() -> None:
    assert find_unpicklable_part(closure_with([1, 2]), "train_loop", pickle_error) is None


def test_closure_variables_are_searched() -> None:
    expected = (
        "train_loop -> closure variable 'value' -> ['lock'] -> _thread.lock cannot be pickled"
    )
    assert describe_unpicklable(closure_with({"number": 1, "lock": LOCK})) == expected


def test_globals_of_nested_functions_are_searched() -> None:
    def train_loop() -> Any:
        return lambda: LOCK

    assert (
        describe_unpicklable(train_loop)
        == "train_loop -> global 'LOCK' -> _thread.lock cannot be pickled"
    )


def test_default_arguments_are_searched() -> None:
    def train_loop(a: int, b: Any = LOCK) -> Any:
        return a, b

    def by_name(*, c: Any = LOCK) -> Any:
        return c

    assert "train_loop -> default of 'b' -> _thread.lock" in describe_unpicklable(train_loop)
    assert "train_loop -> default of 'c' -> _thread.lock" in describe_unpicklable(by_name)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (functools.partial(print, LOCK), "bound argument 0"),
        (functools.partial(print, end=LOCK), "bound argument 'end'"),
        (Holder(LOCK).method, "its object -> .value"),
        (Holder([0, LOCK]), ".value -> [1]"),
        (WithSlots(LOCK), ".value"),
        (SimpleNamespace(a=1, lock=LOCK), ".lock"),
        ((1, (2, LOCK)), "[1] -> [1]"),
        ({"a" * 60: LOCK}, "['" + "a" * 36 + "…]"),
        ({LOCK: 1}, "key <_thread.lock>"),
    ],
)
def test_containers_and_attributes_are_searched(value: Any, path: str) -> None:
    assert describe_unpicklable(value) == f"train_loop -> {path} -> _thread.lock cannot be pickled"


def test_attributes_of_a_local_class_are_searched() -> None:
    class Local:
        lock = LOCK

    assert describe_unpicklable(Local()) == (
        f"train_loop -> its class {Local.__qualname__} -> .lock -> _thread.lock cannot be pickled"
    )


def test_object_whose_reduce_raises_is_named() -> None:
    part = find_unpicklable_part(closure_with([RaisesInReduce()]), "train_loop", pickle_error)
    assert part is not None
    assert part.path == ("train_loop", "closure variable 'value'", "[0]")
    assert "RaisesInReduce" in str(part)
    assert "not picklable" in str(part.error)


def test_cyclic_references_are_supported() -> None:
    inner: dict[str, Any] = {}
    outer = {"inner": inner, "lock": LOCK}
    inner["outer"] = outer
    assert describe_unpicklable(outer) == "train_loop -> ['lock'] -> _thread.lock cannot be pickled"


def test_search_depth_is_limited() -> None:
    chain: list[Any] = [LOCK]
    for _ in range(100):
        chain = [chain]
    part = find_unpicklable_part(chain, "train_loop", pickle_error)
    assert part is not None
    assert len(part.path) < 50


def test_parts_of_a_module_are_its_attributes() -> None:
    module = ModuleType("module")
    vars(module)["lock"] = LOCK
    assert (".lock", LOCK) in list(iterate_parts(module))


def test_registered_reducer_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        copyreg.dispatch_table, WithSlots, lambda instance: (WithSlots, ([instance.value],))
    )
    assert dict(iterate_parts(WithSlots(7))) == {"its value": [7]}


def test_unbound_closure_variable_is_skipped() -> None:
    def train_loop() -> Any:
        return later

    assert list(iterate_parts(train_loop)) == []
    later = 1


def test_largest_parts_are_sorted_by_size() -> None:
    value = {"small": b"1", "large": b"1" * 100, "middle": b"1" * 10}
    assert largest_parts(value, len, count=2) == [("['large']", 100), ("['middle']", 10)]


def test_unpicklable_part_is_formatted_as_a_path() -> None:
    part = UnpicklablePart(("f", "global 'g'"), LOCK, TypeError("no"))
    assert str(part) == "f -> global 'g' -> _thread.lock cannot be pickled"
