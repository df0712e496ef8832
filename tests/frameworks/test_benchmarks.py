"""Our side of the benchmark of training libraries runs at a small size; no figure is checked."""

import pytest

from benchmarks import frameworks
from benchmarks.peers import OURS
from benchmarks.run_once import run_once


@pytest.mark.parametrize("library", frameworks.TRAINERS)
def test_a_restart_is_measured(library: str) -> None:
    pytest.importorskip(library)
    run = run_once(OURS, frameworks.FIGURES[f"restarts_{library}"].job(OURS), limit_s=60.0)
    reading = frameworks.read_restart(run)
    assert reading is not None, run.tail
    assert reading.more["steps_lost"] >= 0


@pytest.mark.parametrize("library", frameworks.SIZES)
def test_each_save_is_measured(library: str) -> None:
    pytest.importorskip(library)
    model, _ = frameworks.SIZES[library]
    job = frameworks.job(library, frameworks.SAVE | model | {"step_s": 0.1})
    run = run_once(OURS, job, limit_s=60.0)
    reading = frameworks.read_save(run)
    assert reading is not None, run.tail
    assert len(reading.more["stalls_s"]) == frameworks.SAVES
