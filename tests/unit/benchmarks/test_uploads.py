"""The figure of uploads."""

import dataclasses
from typing import Any

from benchmarks.run_once import Run, parse_events
from benchmarks.uploads import figure, read


def a_run(*took_s: float) -> Run:
    """A run whose uploads ended at 10, 20, ..."""
    lines = [
        f'{{"event": "uploaded", "at": {10.0 * n}, "fit": 0, "took_s": {took}}}\n'
        for n, took in enumerate(took_s, 1)
    ]
    empty_fields: dict[str, Any] = {field.name: None for field in dataclasses.fields(Run)}
    return Run(**(empty_fields | {"events": parse_events(lines)}))


def test_figure_is_the_median_and_the_first_call_is_reported() -> None:
    reading = read(a_run(4.0, 1.0, 2.0))
    assert reading is not None
    assert (reading.value, reading.more) == (2.0, {"first_s": 4.0})
    assert (reading.since, reading.until) == (6.0, 30.0)


def test_run_with_a_missing_upload_has_no_figure() -> None:
    assert read(a_run(4.0, 1.0)) is None


def test_each_kind_has_its_figure() -> None:
    names = {kind: figure(kind).name for kind in ("one", "many")}
    assert names == {"one": "uploads_one", "many": "uploads_many"}
