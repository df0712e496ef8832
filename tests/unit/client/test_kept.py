"""The checkpoints of a run: told, written to a file, and deleted once nobody leads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spotfit.checkpoint.handle import Checkpoint
from spotfit.client.kept import Content, Kept, export, kept_as, kept_in, remove
from spotfit.core.errors import ConfigError, MachineError, NotFoundError, RunNotFoundError
from spotfit.ledger.run import Ledger
from spotfit.model.events import FitEnded, FitStarted
from spotfit.store.opening import open_store
from spotfit.testing.builders import RUN, a_commit, a_spec, an_agent
from tests.unit.checkpoint.kept import part, saved
from tests.unit.checkpoint.snapshots import BIG, brought, bytes_of


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A run with a report of files, and two snapshots that share a tensor."""
    url = str(tmp_path / "run")
    store = open_store(url)
    ledger = Ledger(store, RUN, an_agent(0))
    saved(store, tmp_path / "files", part("own"), x="1")
    frozen = bytes_of(1, BIG)
    brought(store, tmp_path / "s", "a", [frozen, bytes_of(2, 50)])
    brought(store, tmp_path / "s", "b", [frozen, bytes_of(3, 50)], base="a")
    ledger.append(FitStarted(a_spec(storage_url=url)), after=ledger.catch_up())
    saves: dict[str, dict[str, Any]] = {
        "own": {},
        "a": {"snapshot": True},  # as it was before entries told of steps
        "b": {"snapshot": True, "step": 5, "why": "100 steps since the last save"},
    }
    for name, told in saves.items():
        ledger.append(a_commit(name, **told), after=ledger.catch_up())
    return url


def end(url: str) -> None:
    ledger = Ledger(open_store(url), RUN, an_agent(0))
    ledger.append(FitEnded("finished", "all is done"), after=ledger.catch_up())


def test_each_is_told(url: str) -> None:
    own, _, latest = kept_in(url)
    assert own == kept_as(url, "own") == Kept("own", 0, {"loss": 1.0}, None)
    assert latest == Kept("b", 0, {"loss": 1.0}, 5, "100 steps since the last save")
    assert kept_as(url, "") == latest._replace(content=Content(5, 0, 1, 2, BIG + 50, BIG))


def test_a_list_is_read_from_the_journal_but_for_what_that_does_not_hold(url: str) -> None:
    store = open_store(url)
    for name in ("own", "a", "b"):
        for found in list(store.list(f".spotfit/manifests/{name}")):
            store.delete(found.key)
    own, old, latest = kept_in(url)
    assert [own.broken, latest.broken] == ["", ""]
    assert "gone or in pieces" in old.broken


def test_what_the_journal_does_not_tell_is_read(url: str) -> None:
    assert [one.step for one in kept_in(url)] == [None, 5, 5]


def test_one_in_pieces_is_told_too(url: str) -> None:
    open_store(url).delete("b/index-0.json")
    broken = kept_as(url, "b")
    assert "b/index-0.json" in broken.broken
    assert isinstance(broken, Kept)


def test_a_model_becomes_a_file(url: str, tmp_path: Path) -> None:
    assert export(url, "", tmp_path / "out" / "m.safetensors") == "b"
    assert export(url, "a", tmp_path / "m.pt", everything=True) == "a"
    model = torch.load(tmp_path / "m.pt", weights_only=True)["model"]
    assert bytes(model["w1"].tolist()) == bytes_of(2, 50)
    assert (tmp_path / "out" / "m.safetensors").stat().st_size > BIG


@pytest.mark.parametrize(
    ("name", "file", "everything", "why"),
    [
        ("b", "", False, "is a folder"),
        ("b", "m.onnx", False, "does not say what kind"),
        ("b", "m.safetensors", True, "holds tensors only"),
        ("b", "m.SAFETENSORS", True, "holds tensors only"),
        ("own", "m.pt", False, "no snapshot of a Checkpointer"),
    ],
)
def test_what_cannot_be_written_is_refused(
    url: str, tmp_path: Path, name: str, file: str, *, everything: bool, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        export(url, name, tmp_path / file, everything=everything)


def test_an_export_to_no_file_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="No file is named"):
        export(url, "b", Path())


@pytest.mark.parametrize("ending", [".PT", ".SafeTensors"])
def test_an_ending_may_be_in_capitals(url: str, tmp_path: Path, ending: str) -> None:
    for name in (f"m{ending}", f"m{ending.lower()}"):
        export(url, "b", tmp_path / name)
    assert (tmp_path / f"m{ending}").stat().st_size == (
        tmp_path / f"m{ending.lower()}"
    ).stat().st_size


def test_what_later_ones_share_does_not_hide_that_one_is_gone(url: str) -> None:
    end(url)
    store = open_store(url)
    handle = Checkpoint.in_store(store, "a")
    remove(url, "a")
    assert list(store.list("a")), "b shares it"
    with pytest.raises(ConfigError, match=r"The checkpoint a in .* is gone"):
        handle.snapshot()


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_a_file_that_cannot_be_written_is_told(url: str, tmp_path: Path, ending: str) -> None:
    (tmp_path / "in the way").touch()
    with pytest.raises(MachineError, match=r"cannot be written: (File exists|Not a directory)"):
        export(url, "b", tmp_path / "in the way" / f"m{ending}")


def test_one_is_found_by_the_name_its_user_chose(url: str, tmp_path: Path) -> None:
    ledger = Ledger(open_store(url), RUN, an_agent(0))
    for n, name in ((2, "last@1-2"), (3, "last@1-3"), (4, "own@1-4")):
        saved(ledger.store, tmp_path / name, part(name, report=n), x="1")
        ledger.append(a_commit(name, report=n), after=ledger.catch_up())
    assert kept_as(url, "last").name == "last@1-3"
    assert kept_as(url, "last@1-2").name == "last@1-2"
    assert kept_as(url, "own").name == "own", "it is called so, and no other"


def test_what_there_is_not_is_told(url: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="keeps no checkpoint c") as missing:
        kept_as(url, "c")
    assert missing.value.do == "It has own, a, b."
    with pytest.raises(RunNotFoundError):
        kept_in(str(tmp_path / "nowhere"))


def test_one_goes_when_nobody_leads_the_run_any_more(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="goes on"):
        remove(url, "a")
    end(url)
    with pytest.raises(ConfigError, match="No checkpoint is named"):
        remove(url, "")
    assert remove(url, "a") == "a"
    assert [one.name for one in kept_in(url)] == ["own", "b"]
    export(url, "b", tmp_path / "m.pt")
    assert remove(url, "b") == "b"
    assert not [found for found in open_store(url).list() if found.key.startswith(("a/", "b/"))]
