"""The comparison detects each kind of difference from Ray Train."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import pytest

from tests.parity.compare import answers_match, differences
from tests.parity.describe import describe


class RayClass:
    def __init__(self, path: str, *, size: int = 3) -> None: ...

    @property
    def metrics(self) -> None: ...

    def fit(self, times: int = 1) -> None: ...


class Reordered:
    def __init__(self, size: int = 3, path: str = "") -> None: ...

    @property
    def metrics(self) -> None: ...

    def fit(self, times: int = 1) -> None: ...


class WithDifferences:
    def __init__(self, path: str, *, size: int = 4) -> None: ...

    @classmethod
    def fit(cls, times: int = 1) -> None: ...


class WithAdditions(RayClass):
    def __init__(self, path: str, *, size: int = 3, colour: str = "red") -> None: ...

    def submit(self) -> None: ...


class WithRequiredParameter(RayClass):
    def __init__(self, path: str, *, size: int = 3, colour: str) -> None: ...


class Passing:
    def __init__(self, *args: object, **kwargs: object) -> None: ...


class Mode(enum.Enum):
    SYNC = "SYNC"


class OtherMode(enum.Enum):
    SYNC = "sync"


@dataclass
class Record:
    name: str = "run"


@dataclass(frozen=True)
class FrozenRecord:
    name: str = "run"


def differences_of(ray: Any, spotfit: Any) -> list[str]:
    known = frozenset({"RayClass"})
    return [one.what for one in differences(describe(ray), describe(spotfit), known=known)]


def test_additional_parameters_are_no_difference() -> None:
    assert differences_of(RayClass, RayClass) == []
    assert differences_of(RayClass, WithAdditions) == []
    assert differences_of(Passing, WithRequiredParameter) == []


@pytest.mark.parametrize(
    ("ray", "spotfit", "expected"),
    [
        (RayClass, Reordered, "takes ['size', 'path'] by position, not ['path']"),
        (
            RayClass,
            WithDifferences,
            "parameter size is ['keyword only', '4'], not ['keyword only', '3']",
        ),
        (RayClass, WithDifferences, "has no property metrics"),
        (RayClass, WithDifferences, "fit is a class method, not a method"),
        (RayClass, WithRequiredParameter, "requires colour"),
        (RayClass, print, "is a function, not a class"),
        (WithAdditions, RayClass, "has no parameter colour"),
        (WithAdditions, RayClass, "has no method submit"),
        (WithAdditions, Reordered, "is no RayClass"),
        (Mode, OtherMode, "values is {'SYNC': 'sync'}, not {'SYNC': 'SYNC'}"),
        (Record, FrozenRecord, "dataclass is frozen, not open"),
        ("train", "test", "value is 'test', not 'train'"),
    ],
)
def test_each_kind_of_difference_is_reported(ray: Any, spotfit: Any, expected: str) -> None:
    assert expected in differences_of(ray, spotfit)


def test_equal_error_classes_are_equal_answers() -> None:
    assert answers_match(
        [1, {"a": {"is": ["ValueError"]}}], [1, {"a": {"is": ["TypeError", "ValueError"]}}]
    )
    assert answers_match({"is": []}, None) is False
    assert not answers_match([1, 2], [1])
    assert not answers_match({"a": 1}, {"a": 2})
    assert not answers_match(None, {"is": ["ValueError"]})
