"""`make gpu`: run every test that needs a GPU, and print a table of what was measured.

    python -m benchmarks.gpu                  the tests marked `gpu`
    python -m benchmarks.gpu --device cpu     the same scenarios on the CPU, without goals
    python -m benchmarks.gpu -k save          the tests that match this expression of pytest

It ends within ten minutes: a test gets at most the time that is left, and is skipped if none is.
Each row is also printed when its test ends, so that a run that is stopped leaves its figures.
Exit status: 0 if rows passed and none failed, 1 if one failed, 3 without a GPU that torch can use.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_table
from benchmarks.gpu_table import GpuRow

ROOT = Path(__file__).resolve().parents[1]
NO_GPU = 3
LIMIT_S = 570.0
_MIN_TEST_S = 15.0
_DEFAULT_TEST_S = 120.0


class RowCollector:
    """A pytest plugin that makes a row of each test and keeps the run within its time limit."""

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.rows: list[GpuRow] = []
        self._now = now
        self._began = now()
        self._deadline = self._began + limit_s
        self._print: Callable[[str], None] = print

    def pytest_configure(self, config: pytest.Config) -> None:
        """Print by pytest's reporter, as pytest captures what plugins print."""
        reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            self._print = reporter.write_line

    @pytest.hookimpl(tryfirst=True, wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Limit the test to the time that is left, or mark it as skipped.

        A wrapper, because pytest-timeout reads the limit in one.
        """
        self._limit(item)
        return (yield)

    def _limit(self, item: pytest.Item) -> None:
        left_s = self._deadline - self._now()
        if left_s < _MIN_TEST_S:
            item.add_marker(pytest.mark.skip(reason="the time of this run is over"))
            return
        own = item.get_closest_marker("timeout")
        own_s = float(own.args[0]) if own else _DEFAULT_TEST_S
        item.add_marker(pytest.mark.timeout(min(own_s, left_s)), append=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the row of a test that has ended, or make it a failed one if its end failed."""
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.rows.append(row_of(report))
        elif report.when == "teardown" and report.failed:
            self.rows[-1] = row_of(report)

    def pytest_runtest_logfinish(self) -> None:
        """Print the row of the test that has ended, and the seconds since the begin of the run."""
        self._print(f"{self._now() - self._began:4.0f} s  {gpu_table.line_of(self.rows[-1])}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failed row."""
        if report.failed:
            self.rows.append(GpuRow(report.nodeid, "failed", _last_line(report.longreprtext)))


def row_of(report: pytest.TestReport) -> GpuRow:
    """Return the row of a test's report, with the figures that it has recorded."""
    figures = [
        gpu_table.figure_of(value)  # type: ignore[arg-type]  # a dict, as the test recorded it
        for name, value in report.user_properties
        if name == "figure"
    ]
    reason = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash is not None else _last_line(report.longreprtext)
    return GpuRow(gpu_table.title_of(report.nodeid), report.outcome, reason, figures)


def why_no_gpu(torch: Any) -> str:
    """Return why `torch`, the module, can use no GPU here, as a sentence; "" if it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} of {sys.executable} is built without CUDA: name a Python "
            "whose torch has it, make gpu PYTHON=/path/to/python."
        )
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU on this machine that it can use."
    return ""


def describe_machine(torch: Any) -> str:
    """Return the GPUs and versions that the table belongs to."""
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{', '.join(names)}; torch {torch.__version__}; NCCL {nccl}"


def files_with_gpu_tests(tests: Path) -> list[Path]:
    """Return the test files that have tests marked `gpu`, those of single modules first."""
    found = [path for path in tests.rglob("test_*.py") if "mark.gpu" in path.read_text()]
    scenarios = tests / "gpu"
    if scenarios.is_dir():
        found += [path for path in scenarios.glob("test_*.py") if path not in found]
    return sorted(found, key=lambda path: (path.parent == scenarios, path))


def run(device: str, limit_s: float, only: str = "") -> list[GpuRow]:
    """Run the tests of that device, "cuda" or "cpu", and return their rows.

    `only` is an expression of pytest's option `-k`.
    """
    collector = RowCollector(limit_s)
    # Other packages of the machine's Python may warn: that is not what is tested here.
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"]
    options += ["-k", only]
    if device == "cuda":
        chosen = ["-m", "gpu", *map(str, files_with_gpu_tests(ROOT / "tests"))]
    else:
        chosen = ["-m", "not gpu", str(ROOT / "tests" / "gpu")]
    pytest.main([*options, "--rootdir", str(ROOT), *chosen], plugins=[collector])
    return collector.rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the table and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("-k", dest="only", metavar="EXPRESSION", default="")
    options = parser.parse_args(arguments)
    try:
        import torch
    except ImportError as error:
        print(f"{sys.executable} cannot import torch: {error}.", file=sys.stderr)
        return NO_GPU
    if options.device == "cuda" and (reason := why_no_gpu(torch)):
        print(reason, file=sys.stderr)
        return NO_GPU
    rows = run(options.device, options.limit_s, options.only)
    machine = describe_machine(torch) if options.device == "cuda" else "CPU: goals are not checked"
    print(f"\n{machine}\n\n{gpu_table.of_rows(rows)}\n{gpu_table.summary(rows)}")
    return gpu_table.exit_status(rows)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
