"""The command: what it shows, what it writes, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spotfit.core.errors import ConfigErrors, MissingExtraError
from spotfit.migrate.command import app

SCRIPT = "import ray.train\nray.train.report({})\n"
MOVED = "import spotfit\nspotfit.report({})\n"
HALF = "import ray.data\nray.data.read_csv('x')\n"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_without_a_word_it_shows_and_writes_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for flags in ([], ["--diff"]):
        done = run(script, *flags)
        assert done.exit_code == 0
        assert "-import ray.train\n" in done.output
        assert "+import spotfit\n" in done.output
        assert "nothing left to do by hand" in done.output
    assert script.read_text() == SCRIPT


def test_what_it_shows_is_a_patch_to_the_letter(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("if 1:\n\timport ray.train  # :warning: [b]\n")
    assert "+\timport spotfit  # :warning: [b]\n" in run(script).output


def test_it_writes_when_asked_and_is_done(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    first = run("--write", script)
    assert (first.exit_code, script.read_text()) == (0, MOVED)
    assert "@@" not in first.output
    second = run("--write", tmp_path)
    assert (second.exit_code, second.output, script.read_text()) == (0, "", MOVED)


def test_what_is_left_is_listed_and_is_an_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "data.py"
    script.write_text(HALF)
    done = run("--write", script)
    assert done.exit_code == 1
    assert "nothing to move, 1 left to do by hand" in done.output
    assert "line 2: ray.data.read_csv: Ray Data stays with Ray" in done.output


def test_a_script_that_is_no_python_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run("--write", tmp_path)
    assert isinstance(done.exception, ConfigErrors)
    assert "broken.py is no Python" in str(done.exception)
    assert (tmp_path / "train.py").read_text() == MOVED


def test_the_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    done = run(tmp_path)
    assert isinstance(done.exception, MissingExtraError)
    assert "spotfit[migrate]" in str(done.exception)


def test_it_is_started_as_a_module_and_ends_with_two_on_an_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "spotfit.migrate", str(tmp_path / "nothing.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "There is no" in done.stderr
    assert "Traceback" not in done.stderr
