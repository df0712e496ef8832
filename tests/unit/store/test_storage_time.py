"""The storage's clock: how far it is ahead of this machine's."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import NotFoundError
from spotfit.store.storage_time import measure_offset_ms, written_at_ms


class StampedStore:
    """Records one time for the object "k"; others do not exist."""

    def __init__(self, at_ms: int | None) -> None:
        self.at_ms = at_ms

    def written_at_ms(self, key: str) -> int | None:
        if key != "k":
            raise NotFoundError(key)
        return self.at_ms


def offset_ms(stamped_ms: int | None, *, before_ms: int = 0, after_ms: int = 0) -> int:
    """The offset measured by a write between two times of this machine's clock."""
    times = [before_ms, after_ms]
    store: Any = StampedStore(stamped_ms)
    return measure_offset_ms(store, "k", lambda: None, lambda: times.pop(0))


@pytest.mark.parametrize(("stamped_ms", "expected_ms"), [(60_000, 60_000), (-60_000, -60_000)])
def test_the_offset_is_that_of_the_storage(stamped_ms: int, expected_ms: int) -> None:
    assert offset_ms(stamped_ms) == expected_ms


def test_the_object_is_assumed_to_be_written_in_the_middle_of_the_request() -> None:
    assert offset_ms(100_000, before_ms=10_000, after_ms=14_000) == 88_000


@pytest.mark.parametrize(("stamped_ms", "expected_ms"), [(2000, 0), (2001, 2001), (-2001, -2001)])
def test_differences_up_to_two_seconds_are_rounding(stamped_ms: int, expected_ms: int) -> None:
    assert offset_ms(stamped_ms) == expected_ms


def test_the_duration_of_the_request_makes_the_offset_uncertain() -> None:
    assert offset_ms(16_000, before_ms=10_000, after_ms=14_000) == 0
    assert offset_ms(16_001, before_ms=10_000, after_ms=14_000) == 4_001


def test_a_storage_without_times_has_this_machines_clock() -> None:
    assert offset_ms(None, before_ms=5, after_ms=5) == 0
    untimed: Any = object()
    assert measure_offset_ms(untimed, "k", lambda: None, lambda: 5) == 0


def test_the_object_is_written_before_its_time_is_read() -> None:
    written: list[str] = []
    store: Any = StampedStore(None)
    store.written_at_ms = lambda key: 60_000 if written == [key] else None
    assert measure_offset_ms(store, "k", lambda: written.append("k"), lambda: 0) == 60_000


def test_a_missing_object_has_no_time() -> None:
    store: Any = StampedStore(60_000)
    assert written_at_ms(store, "k") == 60_000
    assert written_at_ms(store, "other") is None
