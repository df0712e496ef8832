"""CPU seconds of a process tree: parsing of /proc, and interpolation."""

import os
from pathlib import Path

import pytest

from benchmarks.process_tree import TAG, ProcessTree, between, parse_stat

LINE = (
    "4711 (a (rude) name) S 42 4711 4711 0 -1 4194560 1000 2000 0 0 "
    "150 50 999 999 20 0 1 0 12345 1000000 500 18446744073709551615"
)


def test_process_name_with_spaces_and_parentheses_is_parsed() -> None:
    stat = parse_stat(LINE, ticks_per_s=100)
    assert stat.parent == 42
    assert stat.cpu_s == 2.0
    assert stat.age_from_boot_s == 123.45
    assert not stat.is_dead


def test_zombie_counts_as_dead() -> None:
    assert parse_stat(LINE.replace(") S ", ") Z "), ticks_per_s=100).is_dead


def test_interval_is_interpolated_between_samples() -> None:
    series = [(10.0, 0.0), (11.0, 2.0), (13.0, 3.0)]
    assert between(series, 10.5, 12.0) == pytest.approx(1.5)


def test_interval_is_clamped_to_the_samples() -> None:
    series = [(10.0, 1.0), (11.0, 2.0)]
    assert between(series, 5.0, 99.0) == 2.0
    assert between([], 5.0, 99.0) == 0.0


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_process_without_the_tag_does_not_belong() -> None:
    other_tree = ProcessTree("an unused tag")
    assert TAG not in os.environ
    assert other_tree.alive() == []
