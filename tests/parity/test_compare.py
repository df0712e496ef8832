"""The comparison detects each kind of difference from Ray Train."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import pytest

from tests.parity.compare import answers_match, differences
from tests.parity.describe import describe


class Theirs:
    def __init__(self, path: str, *, size: int = 3) -> None: ...

    @property
    def metrics(self) -> None: ...

    def fit(self, times: int = 1) -> None: ...


class Reordered:
    def __init__(self, size: int = 3, path: str = "") -> None: ...

    @property
    def metrics(self) -> None: ...

    def fit(self, times: int = 1) -> None: ...


class Shorter:
    def __init__(self, path: str, *, size: int = 4) -> None: ...

    @classmethod
    def fit(cls, times: int = 1) -> None: ...


class Longer(Theirs):
    def __init__(self, path: str, *, size: int = 3, colour: str = "red") -> None: ...

    def submit(self) -> None: ...


class Greedy(Theirs):
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


def differences_of(theirs: Any, ours: Any) -> list[str]:
    known = frozenset({"Theirs"})
    return [one.what for one in differences(describe(theirs), describe(ours), known=known)]


def test_additional_parameters_are_no_difference() -> None:
    assert differences_of(Theirs, Theirs) == []
    assert differences_of(Theirs, Longer) == []
    assert differences_of(Passing, Greedy) == []


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (Theirs, Reordered, "takes ['size', 'path'] by position, not ['path']"),
        (Theirs, Shorter, "parameter size is ['keyword only', '4'], not ['keyword only', '3']"),
        (Theirs, Shorter, "has no property metrics"),
        (Theirs, Shorter, "fit is a class method, not a method"),
        (Theirs, Greedy, "asks for colour"),
        (Theirs, print, "is a function, not a class"),
        (Longer, Theirs, "has no parameter colour"),
        (Longer, Theirs, "has no method submit"),
        (Longer, Reordered, "is no Theirs"),
        (Mode, OtherMode, "values is {'SYNC': 'sync'}, not {'SYNC': 'SYNC'}"),
        (Record, FrozenRecord, "dataclass is frozen, not open"),
        ("train", "test", "value is 'test', not 'train'"),
    ],
)
def test_each_kind_of_difference_is_reported(theirs: Any, ours: Any, words: str) -> None:
    assert words in differences_of(theirs, ours)


def test_equal_error_classes_are_equal_answers() -> None:
    assert answers_match(
        [1, {"a": {"is": ["ValueError"]}}], [1, {"a": {"is": ["TypeError", "ValueError"]}}]
    )
    assert answers_match({"is": []}, None) is False
    assert not answers_match([1, 2], [1])
    assert not answers_match({"a": 1}, {"a": 2})
    assert not answers_match(None, {"is": ["ValueError"]})
