"""Our side of the benchmarks runs at a small size; the figures themselves are not checked."""

import sys
from pathlib import Path

import pytest

from benchmarks import checkpointer, fit_to_first_line, measure, report_calls

SMALL = ["--ranks", "2", "--pairs", "1", "--layers", "1", "--steps", "2", "--storage", "disk"]


@pytest.mark.parametrize("figure", ["saves", "restores", "recoveries", "steps"])
def test_checkpointer_benchmark_returns_the_readings_of_its_claims(
    figure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["checkpointer.py", figure, *SMALL])
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "keys"))
    storage = checkpointer.BenchStorage("disk", tmp_path)
    (reading,) = checkpointer.FIGURES[figure](storage, checkpointer.arguments())
    for claim in checkpointer.CLAIMS[figure]:
        assert reading[claim.numerator] > 0
        assert reading[claim.denominator] > 0


@pytest.mark.parametrize("module", [fit_to_first_line, report_calls])
def test_figure_is_measured_without_peers(
    module: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["figure.py", "--alone", "ours", "--runs", "1"])
    measure.main(module.FIGURE)  # type: ignore[attr-defined]
    assert len(list(tmp_path.iterdir())) == 1
