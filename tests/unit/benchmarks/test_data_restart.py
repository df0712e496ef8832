"""The statistics of data_restart.py."""

import pytest

from benchmarks import data_restart
from benchmarks.data_restart import LIMIT_S, Restart, compare, table


def runs_of(monkeypatch: pytest.MonkeyPatch, **runs: list[Restart]) -> list[str]:
    """Replace the runs of each side by these; return the sides in the order of their runs."""
    order = list[str]()

    def run(side: str) -> Restart:
        order.append(side)
        return runs[side].pop(0)

    monkeypatch.setattr(data_restart, "run", run)
    return order


def test_pairs_alternate_and_the_first_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [Restart("ray", 20.0, 30.0)] * 4
    fast = [Restart("spotfit", wall_s, 1.0) for wall_s in (99.0, 1.0, 2.0, 4.0)]
    order = runs_of(monkeypatch, ray=slow, spotfit=fast)

    compared = compare("ray", 3)

    assert order == ["spotfit", "ray", "spotfit", "ray", "ray", "spotfit", "spotfit", "ray"]
    assert compared["wall_s"] == {"spotfit": 2.0, "peer": 20.0, "ratio": 10.0, "lower": 5.0}
    assert compared["cpu_s"]["ratio"] == 30.0
    assert compared["failed"] == 0
    assert "2.00 / 20.00: 10.0x (5.0)" in table([compared])


def test_a_failed_run_counts_as_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = [Restart("ray", LIMIT_S, LIMIT_S, "Traceback")] * 2
    runs_of(monkeypatch, ray=failed, spotfit=[Restart("spotfit", 2.0, 1.0)] * 2)

    compared = compare("ray", 1)

    assert compared["failed"] == 1
    assert compared["wall_s"]["ratio"] == LIMIT_S / 2.0
