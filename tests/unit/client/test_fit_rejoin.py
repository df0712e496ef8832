"""A second fit() of an active run: the same script rejoins, changed code is refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spotfit.data
from spotfit.client.fit import start_run
from spotfit.client.run_config import RunConfig
from spotfit.code import function_pickle
from spotfit.core.errors import RunActiveError
from spotfit.model.config import FailureConfig
from spotfit.model.group import GroupRequest
from spotfit.model.offer import Market, Offer, Price
from spotfit.provision.offers import OfferListing
from tests.unit.client.harness import ClientHarness

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
    """A project of two modules, which tests edit and import again."""

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


def test_unchanged_code_rejoins(harness: ClientHarness, project: Project) -> None:
    start_run(harness.request(project.train()))
    start_run(harness.request(project.train()))
    project.edit("SCALE = 3", "# Three is enough.\n\nSCALE = 3")
    start_run(harness.request(project.train()))
    assert harness.view.fit_count == 1


def test_a_run_with_a_large_table_is_rejoined(
    harness: ClientHarness, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("MAX_PICKLE_BYTES", "WARN_PICKLE_BYTES"):
        monkeypatch.setattr(function_pickle, limit, 2**20)
    table = spotfit.data.from_numpy(np.random.default_rng(0).random(2**18))
    for _ in range(2):
        start_run(harness.request(project.train(), datasets={"train": table}))
    assert harness.view.fit_count == 1


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
def test_changed_code_is_refused(
    harness: ClientHarness, project: Project, old: str, new: str
) -> None:
    start_run(harness.request(project.train()))
    project.edit(old, new)
    with pytest.raises(RunActiveError, match="helper changed after its start") as refused:
        start_run(harness.request(project.train()))
    assert "continues from its latest checkpoint" in refused.value.do
    assert harness.view.fit_count == 1


def test_changed_files_are_refused(harness: ClientHarness, project: Project) -> None:
    def request() -> Any:
        run = RunConfig(
            name="digits",
            storage_path=harness.storage_path,
            worker_runtime_env={"working_dir": str(project.folder)},
        )
        return harness.request(project.train(), run=run)

    start_run(request())
    start_run(request())
    (project.folder / "words.txt").write_text("new")
    with pytest.raises(RunActiveError, match="the files of working_dir or py_modules changed"):
        start_run(request())


def test_a_changed_price_is_no_changed_run(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offers(_request: GroupRequest) -> OfferListing:
        usd_per_hour = next(prices)
        price = Price(usd_per_hour=usd_per_hour, source="given", as_of_s=usd_per_hour)
        offer = Offer(name="a/spot", provisioner="a", market=Market.SPOT, price=price)
        return OfferListing(offers=(offer,))

    prices = iter((1.0, 2.0))
    monkeypatch.setattr(harness.cloud, "offers", offers, raising=False)
    start_run(harness.request())
    start_run(harness.request())
    [offer] = harness.view.spec.cost.offers
    assert offer.price is not None
    assert offer.price.usd_per_hour == 1.0
    assert next(prices) == 2.0, "an active run is not asked for prices again"
    shown = capsys.readouterr().err
    assert "run.rejoined" in shown
    assert "ignored" not in shown


def test_changed_settings_without_effect_are_logged(
    harness: ClientHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    start_run(harness.request())
    start_run(harness.request())
    assert "ignored" not in capsys.readouterr().err
    failure = FailureConfig(max_failures=7)
    run = RunConfig(name="digits", storage_path=harness.storage_path, failure_config=failure)
    start_run(harness.request(run=run, provisioner="local?nodes=2"))
    assert 'ignored="failure_config, provisioner"' in capsys.readouterr().err
