"""The migration command: output, files and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spotfit.core.errors import ConfigErrors, MissingExtraError
from spotfit.migrate.command import app

SCRIPT = "import ray.train\nray.train.report({})\n"
MOVED = "import spotfit\nspotfit.report({})\n"
HALF = "import ray.tune\nray.tune.Tuner('x')\n"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_by_default_a_diff_is_shown_and_nothing_written(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for flags in ([], ["--diff"]):
        done = run(script, *flags)
        assert done.exit_code == 0
        assert "-import ray.train\n" in done.output
        assert "+import spotfit\n" in done.output
        assert "no manual changes left" in done.output
    assert script.read_text() == SCRIPT


def test_the_diff_can_be_applied(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("if 1:\n\timport ray.train  # :warning: [b]\n")
    assert "+\timport spotfit  # :warning: [b]\n" in run(script).output


def test_write_changes_files_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    first = run("--write", script)
    assert (first.exit_code, script.read_text()) == (0, MOVED)
    assert "@@" not in first.output
    second = run("--write", tmp_path)
    assert (second.exit_code, second.output, script.read_text()) == (0, "", MOVED)


def test_manual_changes_are_listed_and_set_the_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "data.py"
    script.write_text(HALF)
    done = run("--write", script)
    assert done.exit_code == 1
    assert "nothing to migrate, 1 manual change left" in done.output
    assert "line 2: ray.tune.Tuner: spotfit has no Tune" in done.output


def test_an_invalid_script_does_not_stop_others(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run("--write", tmp_path)
    assert isinstance(done.exception, ConfigErrors)
    assert "broken.py is not valid Python" in str(done.exception)
    assert (tmp_path / "train.py").read_text() == MOVED


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    done = run(tmp_path)
    assert isinstance(done.exception, MissingExtraError)
    assert "spotfit[migrate]" in str(done.exception)


def test_the_module_exits_with_code_2_on_an_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "spotfit.migrate", str(tmp_path / "nothing.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_notebook_is_migrated(tmp_path: Path) -> None:
    notebook = tmp_path / "nb.ipynb"
    cell = {"cell_type": "code", "source": [SCRIPT.removesuffix("\n"), "\nray.train.nothing"]}
    notebook.write_text(json.dumps({"cells": [cell]}))
    done = run("--write", notebook)
    assert "nb.ipynb: migrated, 1 manual change left" in done.output
    assert "code cell 1, line 3: ray.train.nothing" in done.output
    assert done.exit_code == 1
    assert "import spotfit" in notebook.read_text()
