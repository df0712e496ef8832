"""The run of `make gpu`: rows, time limit and exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu_table import GpuFigure, GpuRow

TESTS = """
import pytest

def test_it_measures(record_property):
    record_property("figure", {"name": "copy", "value": 2.0, "unit": "s", "at_most": 3.0})

def test_it_misses_its_goal(record_property):
    record_property("figure", {"name": "copy", "value": 4.0, "unit": "s", "at_most": 3.0})
    assert 4.0 <= 3.0

@pytest.mark.skipif(True, reason="needs two GPUs")
def test_it_is_skipped():
    pass

@pytest.fixture
def dirty():
    yield
    raise RuntimeError("something was left")

def test_it_leaves_something(dirty):
    pass
"""


def rows_of(folder: Path, program: str = TESTS, **options: Any) -> list[GpuRow]:
    """Run the tests in another process, as pytest cannot run in itself; return its rows."""
    names = {"GpuRow": GpuRow, "GpuFigure": GpuFigure}
    rows: list[GpuRow] = eval(output_of(folder, program, **options).rpartition("ROWS ")[2], names)  # noqa: S307
    return rows


def output_of(folder: Path, program: str = TESTS, **options: Any) -> str:
    """Return what the run of `rows_of` prints; its last line has the rows."""
    (folder / "test_rows.py").write_text(program)
    code = (
        "import pytest; from benchmarks import gpu; gpu._MIN_TEST_S = 0.1\n"
        f"now_s = {options.get('now_s', 0)}\n"
        f"collector = gpu.RowCollector({options.get('limit_s', 60)}, now=lambda: 0.0)\n"
        "collector._now = lambda: now_s\n"
        f"pytest.main(['-q', '-p', 'no:cacheprovider', '-c', '/dev/null', {str(folder)!r}], "
        "plugins=[collector])\n"
        "print('ROWS', repr(collector.rows))"
    )
    root = Path(gpu.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    ).stdout


def test_each_test_is_a_row_with_its_figures_and_reason(tmp_path: Path) -> None:
    measures, misses, skipped, leaves = rows_of(tmp_path)
    assert measures == GpuRow("it measures", "passed", "", [GpuFigure("copy", 2.0, "s", 3.0)])
    assert (misses.outcome, misses.figures) == ("failed", [GpuFigure("copy", 4.0, "s", 3.0)])
    assert "4.0 <= 3.0" in misses.reason
    assert (skipped.outcome, skipped.reason) == ("skipped", "needs two GPUs")
    assert (leaves.outcome, leaves.reason) == ("failed", "RuntimeError: something was left")


def test_a_row_is_printed_when_its_test_ends(tmp_path: Path) -> None:
    program = TESTS + "\ndef test_it_ends_the_process():\n    import os\n    os._exit(0)\n"
    output = output_of(tmp_path, program)
    assert "ROWS" not in output, "the process has ended before the table"
    assert " s  passed: it measures; copy 2 s\n" in output
    assert " s  skipped: it is skipped; needs two GPUs\n" in output


def test_a_file_that_cannot_be_imported_is_a_failed_row(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, "import a_package_that_is_missing")
    assert row.outcome == "failed"
    assert "a_package_that_is_missing" in row.reason


def test_without_time_left_tests_are_skipped(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "def test_one(): assert False", limit_s=0)
    assert [(row.outcome, row.reason) for row in rows] == [
        ("skipped", "the time of this run is over")
    ]


def test_a_test_is_stopped_when_the_time_of_the_run_is_over(tmp_path: Path) -> None:
    """Also one with a longer limit of its own: 0.5 s of 20 s are left when it begins."""
    program = """
import pytest, signal

@pytest.mark.timeout(300)
def test_it_hangs():
    signal.pause()
"""
    (row,) = rows_of(tmp_path, program, limit_s=20, now_s=19.5)
    assert row.outcome == "failed"
    assert "Timeout" in row.reason
    assert "0.5" in row.reason


def a_torch(*, cuda: str | None, available: bool) -> Any:
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda, hip=None),
        cuda=SimpleNamespace(is_available=lambda: available),
    )


def test_the_reason_for_no_gpu_is_one_sentence() -> None:
    assert "is built without CUDA" in gpu.why_no_gpu(a_torch(cuda=None, available=False))
    assert "finds no GPU" in gpu.why_no_gpu(a_torch(cuda="13.0", available=False))
    assert gpu.why_no_gpu(a_torch(cuda="13.0", available=True)) == ""


def test_without_a_gpu_the_status_is_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", a_torch(cuda="13.0", available=False))
    assert gpu.main([]) == 3
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(
    any(map(os.path.exists, ("/dev/nvidia0", "/proc/driver/nvidia/gpus", "/dev/dxg"))),
    reason="this machine has a GPU",
)
def test_the_script_installs_nothing_without_a_gpu_and_make_names_its_status() -> None:
    script = subprocess.run([gpu.ROOT / ".ci" / "gpu"], capture_output=True, text=True, check=False)
    assert (script.returncode, script.stdout) == (3, "")
    (sentence,) = script.stderr.splitlines()
    assert sentence.startswith("This machine has no NVIDIA GPU: ")
    by_make = subprocess.run(
        ["make", "gpu"], cwd=gpu.ROOT, capture_output=True, text=True, check=False
    )
    # 2 for any failed recipe: https://www.gnu.org/software/make/manual/html_node/Running.html
    assert by_make.returncode == 2
    assert sentence in by_make.stderr
    assert by_make.stderr.rstrip().endswith("Error 3")


def test_without_torch_the_status_is_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu.main([]) == 3


def test_every_file_with_gpu_tests_is_run() -> None:
    files = gpu.files_with_gpu_tests(gpu.ROOT / "tests")
    names = [path.name for path in files]
    assert {"test_tensor_arena.py", "test_prepare.py", "test_data_loader.py"} <= set(names)
    are_long = [path.parent.name == "gpu" for path in files]
    assert are_long == sorted(are_long), "the longest last"
