"""A second fit() under a name that is taken: the same script joins, and changed code is told."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.client.config import RunConfig
from spotfit.client.fit import begin
from spotfit.core.errors import RunActiveError
from spotfit.model.config import FailureConfig
from tests.unit.client.door import Door

TRAIN = """
import helper

def train():
    return helper.Net().forward(2)
"""
HELPER = """
SCALE = 3

class Net:
    bias = 1

    def forward(self, x):
        return scaled(x) + self.bias

def scaled(x):
    return x * SCALE

def unused():
    return 0
"""


class Project:
    """A user's two modules, edited and imported anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "job.py").write_text(TRAIN)
        self.edit("", "")

    def edit(self, old: str, new: str) -> None:
        (self.folder / "helper.py").write_text(HELPER.replace(old, new) if old else HELPER)

    def train(self) -> Callable[[], Any]:
        """The function, as a new process would import it."""
        for name in ("job", "helper"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        fn: Callable[[], Any] = importlib.import_module("job").train
        return fn


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Project(folder)
    for name in ("job", "helper"):
        sys.modules.pop(name, None)


def test_who_changed_nothing_that_travels_joins(door: Door, project: Project) -> None:
    begin(door.request(project.train()))
    begin(door.request(project.train()))
    project.edit("SCALE = 3", "# Three is enough.\n\nSCALE = 3")
    begin(door.request(project.train()))
    assert door.view.fits == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SCALE = 3", "SCALE = 4"),
        ("x * SCALE", "x + SCALE"),
        ("bias = 1", "bias = 2"),
        ("+ self.bias", "- self.bias"),
    ],
    ids=["a constant", "a function", "an attribute", "a method"],
)
def test_code_that_changed_since_it_began_is_not_taken_for_the_one_that_runs(
    door: Door, project: Project, old: str, new: str
) -> None:
    begin(door.request(project.train()))
    project.edit(old, new)
    with pytest.raises(RunActiveError, match="since then helper changed") as told:
        begin(door.request(project.train()))
    assert "continues from its latest checkpoint" in told.value.do
    assert door.view.fits == 1


def test_so_are_files_that_travel(door: Door, project: Project) -> None:
    def asked() -> Any:
        run = RunConfig(
            name="digits",
            storage_path=door.storage,
            worker_runtime_env={"working_dir": str(project.folder)},
        )
        return door.request(project.train(), run=run)

    begin(asked())
    begin(asked())
    (project.folder / "words.txt").write_text("new")
    with pytest.raises(RunActiveError, match="the files of working_dir or py_modules changed"):
        begin(asked())


def test_settings_that_are_changed_in_vain_are_told(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(door.request())
    begin(door.request())
    assert "ignored" not in capsys.readouterr().err
    failure = FailureConfig(max_failures=7)
    run = RunConfig(name="digits", storage_path=door.storage, failure_config=failure)
    begin(door.request(run=run, provisioner="local?nodes=2"))
    assert 'ignored="failure_config, provisioner"' in capsys.readouterr().err
