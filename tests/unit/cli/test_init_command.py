"""`spotfit init` reads terraform outputs or asks, and never replaces a file by itself."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spotfit.cli import init_command
from spotfit.cli.main import app
from spotfit.core.errors import ConfigError

OUTPUTS = json.dumps(
    {
        "provisioner": {"value": "kubernetes"},
        "storage_path": {"value": "s3://runs/a"},
        "kubernetes": {"value": {"image": "i:1", "namespace": "training"}},
    }
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments: str, text: str = "") -> Result:
    return CliRunner().invoke(app, ["init", *arguments], input=text)


def written(folder: Path) -> dict[str, object]:
    return tomllib.loads((folder / "spotfit.toml").read_text())


def test_file_of_terraform_outputs_becomes_a_profile(folder: Path) -> None:
    (folder / "spotfit.json").write_text(OUTPUTS)
    result = invoke("--terraform-output", "spotfit.json")
    assert result.exit_code == 0, result.output
    assert written(folder) == {
        "provisioner": "kubernetes",
        "kubernetes": {"image": "i:1", "namespace": "training"},
    }
    assert "spotfit doctor --storage s3://runs/a" in result.stdout


def test_standard_input_is_read(folder: Path) -> None:
    assert invoke("--terraform-output", "-", text=OUTPUTS).exit_code == 0
    assert written(folder)["provisioner"] == "kubernetes"


def test_answers_become_a_profile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_command, "_is_terminal", lambda: True)
    answers = ["aws_batch", "a,b", "", "image:1", "", "", "s3://runs/x"]
    result = invoke(text="\n".join(answers) + "\n")
    assert result.exit_code == 0, result.output
    assert written(folder) == {
        "provisioner": "aws_batch",
        "aws_batch": {"queues": ["a", "b"], "image": "image:1"},
    }


def test_input_that_is_no_terminal_is_reported() -> None:
    error = invoke(text="aws_batch\n").exception
    assert isinstance(error, ConfigError)
    assert "not a terminal" in str(error)
    assert "--terraform-output" in error.do


def test_existing_file_is_kept_without_force(folder: Path) -> None:
    (folder / "spotfit.toml").write_text("mine")
    (folder / "o.json").write_text(OUTPUTS)
    error = invoke("--terraform-output", "o.json").exception
    assert isinstance(error, ConfigError)
    assert (folder / "spotfit.toml").read_text() == "mine"
    assert invoke("--terraform-output", "o.json", "--force").exit_code == 0
    assert written(folder)["provisioner"] == "kubernetes"


def test_invalid_outputs_write_nothing(folder: Path) -> None:
    (folder / "o.json").write_text(OUTPUTS.replace("namespace", "namespaze"))
    error = invoke("--terraform-output", "o.json").exception
    assert isinstance(error, ConfigError)
    assert "namespaze" in str(error)
    assert not (folder / "spotfit.toml").exists()


def test_missing_file_and_conflicting_options_are_reported(folder: Path) -> None:
    assert isinstance(invoke("--terraform-output", "no.json").exception, ConfigError)
    both = invoke("--terraform-output", "-", "--terraform", str(folder)).exception
    assert "cannot be combined" in str(both)
