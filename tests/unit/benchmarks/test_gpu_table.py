"""The table of `make gpu`."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from benchmarks import gpu_table
from benchmarks.gpu_table import GpuFigure, GpuRow


@pytest.mark.parametrize(
    ("value", "at_most", "is_met"),
    [(1.1, 1.1, True), (1.11, 1.1, False), (math.nan, 1.1, False), (10**9, None, True)],
)
def test_a_goal_is_the_largest_value_that_passes(
    value: float, at_most: float | None, is_met: bool
) -> None:
    assert GpuFigure("save / copy", value, at_most=at_most).is_met == is_met


def test_a_figure_survives_as_plain_values() -> None:
    figure = GpuFigure("restore()", 0.25, "s", 2.0)
    assert gpu_table.figure_of(asdict(figure)) == figure


def test_titles_are_the_names_of_tests() -> None:
    node = "tests/gpu/test_gpu.py::test_a_save_blocks[cuda-ddp]"
    assert gpu_table.title_of(node) == "a save blocks [cuda-ddp]"
    assert gpu_table.title_of("tests/x.py::test_on_a_gpu") == "on a gpu"


def test_each_figure_has_a_line_with_its_goal() -> None:
    rows = [
        GpuRow(
            "a save",
            "failed",
            "1.2 | too\nlong",
            (GpuFigure("copy", 25.0, "GB/s"), GpuFigure("r", 1.2, "", 1.1)),
        ),
        GpuRow("a fork", "passed"),
        GpuRow("two GPUs", "skipped", "needs two GPUs"),
    ]
    assert gpu_table.of_rows(rows).splitlines() == [
        "| row | figure | goal | result |",
        "| --- | --- | --- | --- |",
        "| a save | copy 25 GB/s |  | failed: 1.2 / too long |",
        "|  | r 1.2 | ≤ 1.1 |  |",
        "| a fork |  |  | passed |",
        "| two GPUs |  |  | skipped: needs two GPUs |",
    ]
    assert gpu_table.summary(rows) == "1 passed, 1 failed, 1 skipped"


def test_a_long_reason_is_cut() -> None:
    assert len(gpu_table.of_rows([GpuRow("a", "failed", "x" * 1000)]).splitlines()[-1]) < 200


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        (["passed", "skipped"], 0),
        (["passed", "failed"], 1),
        (["skipped"], 1),  # nothing was measured
        ([], 1),
    ],
)
def test_the_exit_status_says_whether_something_passed_and_nothing_failed(
    outcomes: list[str], status: int
) -> None:
    assert gpu_table.exit_status([GpuRow("a", outcome) for outcome in outcomes]) == status
