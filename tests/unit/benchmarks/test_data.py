"""The statistics of data.py."""

from pathlib import Path

import pytest

from benchmarks import data
from benchmarks.bucket import Server
from benchmarks.data import SideRun, compare, table
from benchmarks.sides.data_reading import split_url


def a_run(side: str, cpu_s: float, first_cpu_s: float, memory_mb: int) -> SideRun:
    reading = {"rows": 1000, "cpu_s": cpu_s, "first_cpu_s": first_cpu_s, "wall_s": 9, "first_s": 1}
    return SideRun(side, reading, memory_mb * 1_000_000, 1, 50.0, "")


def runs_of(monkeypatch: pytest.MonkeyPatch, **runs: list[SideRun]) -> list[str]:
    """Replace the runs of each side by these; return the sides in the order of their runs."""
    order = list[str]()

    def run(side: str, _name: str, _storage: str) -> SideRun:
        order.append(side)
        return runs[side].pop(0)

    monkeypatch.setattr(data, "run", run)
    return order


def test_pairs_alternate_and_the_first_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [a_run("ray", 10.0, 8.0, 900)] * 4
    fast = [a_run("spotfit", cpu_s, 0.5, 300) for cpu_s in (99.0, 1.0, 2.0, 4.0)]
    order = runs_of(monkeypatch, ray=slow, spotfit=fast)

    compared = compare("tables", "ray", 3)

    assert order == ["spotfit", "ray", "spotfit", "ray", "ray", "spotfit", "spotfit", "ray"]
    assert compared["pairs"] == 3
    assert compared["rows_per_cpu_s"]["ratio"] == 5.0
    assert compared["rows_per_cpu_s"]["spotfit"] == 500.0
    assert compared["first_cpu_s"]["ratio"] == 16.0
    assert compared["peak_pss_bytes"]["ratio"] == 3.0
    assert compared["pressure"] == [50.0, 50.0]
    assert "500 / 100: 5.0x" in table([compared])


@pytest.mark.parametrize(("side", "folder"), [("huggingface", "text"), ("streaming", "text-mds")])
def test_each_side_reads_its_format_from_a_bucket(
    side: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text-mds").mkdir()
    (tmp_path / "text-mds" / "index.json").touch()
    uploaded, read = list[Path](), list[str]()

    def delayed_server(path: Path) -> Server:
        uploaded.append(path)
        return Server("http://127.0.0.1:5000", "id", "key")

    def execute(_side: str, arguments: tuple[str, ...], _variables: object) -> SideRun:
        read.append(arguments[1])
        return a_run(side, 1.0, 0.5, 300)

    monkeypatch.setattr(data, "create_set", lambda name: tmp_path / name)
    monkeypatch.setattr(data, "_delayed_server", delayed_server)
    monkeypatch.setattr(data, "_execute", execute)

    data.run(side, "text", "s3")

    assert uploaded == [tmp_path / folder]
    assert split_url(read[0]) == (f"s3://bench/data/{folder}", "http://127.0.0.1:5000")


def test_a_failed_run_is_counted_and_has_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SideRun("ray", {}, 0, 1, 50.0, "Traceback")
    runs_of(monkeypatch, ray=[failed] * 2, spotfit=[a_run("spotfit", 1.0, 0.0, 300)] * 2)

    compared = compare("tables", "ray", 1)

    assert (compared["pairs"], compared["failed"]) == (0, 1)
    assert "ray" not in table([compared])


def test_a_first_batch_within_a_tick_of_the_kernel_has_the_length_of_a_tick() -> None:
    assert a_run("spotfit", 1.0, 0.0, 300).first_cpu_s == 0.01
