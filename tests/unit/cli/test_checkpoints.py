"""`spotfit checkpoints` shows what the client tells of a run's checkpoints."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from spotfit.cli.main import app
from tests.unit.client.test_kept import end, url

__all__ = ["url"]


def asked(*words: str) -> Result:
    return CliRunner().invoke(app, ["checkpoints", *words])


def test_all_are_listed(url: str) -> None:
    lines = asked("ls", url).output.splitlines()
    assert [line.split()[0] for line in lines] == ["own", "a", "b"]
    assert "files" in lines[0]
    assert "step 5" in lines[1]


def test_one_is_shown(url: str) -> None:
    told = asked("show", url, "b").output
    assert "2 tensors, 1,048,626 parameters" in told
    assert "step 5, epoch 0, by 1 workers" in told
    assert "1.0 MiB with earlier" in told
    assert "why then     100 steps since the last save" in told
    assert "files of a report" in asked("show", url, "own").output


def test_one_is_exported(url: str, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    assert f"b is in {target}" in asked("export", url, str(target)).output.replace("\n", "")
    assert target.exists()


def test_one_is_deleted(url: str) -> None:
    end(url)
    assert "a was deleted" in asked("rm", url, "a").output
    assert "broken" not in asked("ls", url).output
    for name in ("own", "b"):
        asked("rm", url, name)
    assert asked("ls", url).output == "The run keeps no checkpoint.\n"
