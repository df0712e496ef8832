"""Preflight: whatever can be known to fail is told before a machine is paid for, all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotfit.client.preflight import clear
from spotfit.core.errors import ConfigError, ConfigErrors, SpotfitError, UntrustworthyStoreError
from spotfit.model.config import RunConfig, ScalingConfig
from spotfit.store import memory
from tests.unit.client.test_request import a_request


def two_parameters(config: Any, more: Any) -> None:
    """Nobody could call it."""


def test_a_request_that_may_take_off_is_rooted_at_its_run(tmp_path: Path) -> None:
    cleared = clear(a_request(run=RunConfig(name="digits", storage_path=str(tmp_path))))
    assert cleared.name == "digits"
    assert cleared.store.url.endswith("/digits")
    assert cleared.provisioner.name == "local"
    assert list(cleared.store.list()) == [], "the probe leaves nothing behind"


def test_a_run_without_a_name_gets_one_of_its_own(tmp_path: Path) -> None:
    request = a_request(run=RunConfig(storage_path=str(tmp_path)))
    one, two = clear(request), clear(request)
    assert one.name.startswith("spotfit_run-")
    assert one.name != two.name


def test_all_mistakes_are_told_at_once() -> None:
    request = a_request(
        two_parameters,
        run=RunConfig(
            name="../up",
            storage_path="nowhere://bucket",
            worker_runtime_env={"condaa": {}},
        ),
        provisioner="lokal",
    )
    with pytest.raises(ConfigErrors) as refused:
        clear(request)
    told = str(refused.value)
    assert told.startswith("5 things stand in the way")
    for word in ("two_parameters", "../up", "nowhere", "condaa", "Did you mean 'local'?"):
        assert word in told
    assert all(isinstance(one, ConfigError) for one in refused.value.errors)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fn": two_parameters}, "0 or 1 required arguments"),
        ({"provisioner": "local?nodez=2"}, "nodez"),
        ({"provisioner": "local?nodes=0"}, "nodes"),
        ({"name": "a/b"}, "The run's name"),
        ({"name": "a..b"}, "The run's name"),
    ],
)
def test_a_single_mistake_comes_as_itself(tmp_path: Path, given: Any, says: str) -> None:
    run = RunConfig(name=given.pop("name", "digits"), storage_path=str(tmp_path))
    with pytest.raises(SpotfitError, match=says) as refused:
        clear(a_request(run=run, **given))
    assert not isinstance(refused.value, ConfigErrors)


def test_a_storage_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    request = a_request(run=RunConfig(name="n", storage_path=str(tmp_path / "file")))
    with pytest.raises(SpotfitError) as refused:
        clear(request)
    assert "file" in str(refused.value)


def test_a_bucket_whose_create_lies_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.MemoryStore, "create", memory.MemoryStore.put)
    with pytest.raises(UntrustworthyStoreError):
        clear(a_request(run=RunConfig(name="n", storage_path="memory://liar")))


def test_a_backend_is_asked_whether_it_can_plan_for_so_many(tmp_path: Path) -> None:
    request = a_request(
        run=RunConfig(name="n", storage_path=str(tmp_path)), scaling=ScalingConfig(num_workers=0)
    )
    with pytest.raises(ConfigError, match="Machines for 0"):
        clear(request)
