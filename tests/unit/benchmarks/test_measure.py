"""Which peers a figure is compared with."""

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure, tables
from benchmarks.fit_to_first_line import FIGURE

ALL = [target.setting.name for target in FIGURE.peer_targets]


@pytest.mark.parametrize(
    ("arguments", "compared"), [([], ALL), (["--peers", "ray-tuned"], ["ray-tuned"])]
)
def test_figure_is_compared_with_the_requested_peers(
    arguments: list[str],
    compared: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers: list[str] = []

    def measure_pairs(figure: measure.Figure, target: measure.PeerTarget, pairs: int) -> list[Any]:
        peers.append(target.setting.name)
        return []

    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(measure, "measure_pairs", measure_pairs)
    monkeypatch.setattr(measure, "compare", lambda *_: {})
    monkeypatch.setattr(tables, "of_figure", lambda _: "")
    monkeypatch.setattr(sys, "argv", ["fit_to_first_line.py", *arguments])
    measure.main(FIGURE)
    assert peers == compared


def test_one_figure_is_requested_and_other_arguments_remain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["figure.py", "--of", "one", "--pairs", "2"])
    assert measure.requested(["one", "two"]) == ["one"]
    assert sys.argv == ["figure.py", "--pairs", "2"]


def test_without_a_request_all_figures_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["figure.py"])
    assert measure.requested(["one", "two"]) == ["one", "two"]
