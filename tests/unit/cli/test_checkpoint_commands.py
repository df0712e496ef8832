"""`spotfit checkpoints` lists, shows, exports and deletes checkpoints."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from spotfit.cli.main import app
from tests.unit.client.test_stored_checkpoints import end, url

__all__ = ["url"]


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, ["checkpoints", *words])


def test_ls_lists_all_checkpoints(url: str) -> None:
    lines = invoke("ls", url).output.splitlines()
    assert [line.split()[0] for line in lines] == ["own", "a", "b"]
    assert "files" in lines[0]
    assert "step 5" in lines[1]


def test_show_prints_the_content(url: str) -> None:
    shown = invoke("show", url, "b").output
    assert "2 tensors, 1,048,626 model parameters" in shown
    assert "step 5, epoch 0, by 1 workers" in shown
    assert "1.0 MiB with earlier" in shown
    assert "reason       100 steps since the last save" in shown
    assert "files reported by the training function" in invoke("show", url, "own").output


def test_export_writes_a_file(url: str, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    assert f"Exported b to {target}" in invoke("export", url, str(target)).output.replace("\n", "")
    assert target.exists()


def test_rm_deletes_a_checkpoint(url: str) -> None:
    end(url)
    assert "Deleted a" in invoke("rm", url, "a").output
    assert "corrupt" not in invoke("ls", url).output
    for name in ("own", "b"):
        invoke("rm", url, name)
    assert invoke("ls", url).output == "The run has no checkpoints.\n"
