"""Result: what the journal says, in the words of the API it follows."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from pyarrow import fs

from spotfit.checkpoint.handle import Checkpoint
from spotfit.checkpoint.save import record
from spotfit.client.result import Result, result_of
from spotfit.core.errors import IntegrityError, WorkerGroupError
from spotfit.core.ids import AgentId, RunId
from spotfit.ledger import keys
from spotfit.ledger.journal import Journal
from spotfit.model.events import (
    Blame,
    CheckpointCommitted,
    Entry,
    Event,
    FitEnded,
    FitStarted,
    RankFailure,
    ValidationAsked,
    ValidationEnded,
)
from spotfit.model.spec import Keep, RunSpec
from spotfit.store.api import Store
from spotfit.store.memory import MemoryStore
from spotfit.store.opening import open_store
from tests.unit.checkpoint.kept import part, saved


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "results" / "run")


def run(store: Store, keep: Keep, *events: Event) -> Journal:
    """A run as its journal tells it."""
    journal = Journal(store)
    for event in (FitStarted(RunSpec(RunId("r"), "run", "f", 1, 1, keep=keep)), *events):
        journal.append(Entry(RunId("r"), AgentId("a"), event), journal.catch_up())
    return journal


def kept(store: Store, tmp_path: Path, *scores: Any) -> Sequence[CheckpointCommitted]:
    """Checkpoints c0, c1, ... committed with those scores."""
    events = []
    for n, score in enumerate(scores):
        saved(store, tmp_path / f"c{n}", part(f"c{n}", report=n), model=str(score))
        events.append(CheckpointCommitted(f"c{n}", 1, n, {"eval": {"score": score}}, (0,)))
    return events


def names(best: list[tuple[Checkpoint, dict[str, Any]]] | None) -> list[str]:
    return [Path(checkpoint.path).name for checkpoint, _ in best or []]


BEST_TWO = Keep(2, "eval/score")


def test_it_holds_the_latest_checkpoint_and_the_best_ones(store: Store, tmp_path: Path) -> None:
    journal = run(store, BEST_TWO, *kept(store, tmp_path, 5, 6, 1))
    result = result_of(journal.view, store, return_value=42)
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path).name == "c2", "the latest, not the best"
    assert names(result.best_checkpoints) == ["c0", "c1"], "worst to best, without a bad latest"
    assert (result.return_value, result.error) == (42, None)
    assert result.path == str(tmp_path / "results" / "run")
    assert isinstance(result.filesystem, fs.LocalFileSystem)


class Told(MemoryStore):
    """Tells whose manifests were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get(self, key: str) -> bytes:
        if key.startswith(keys.MANIFESTS):
            self.read.append(key.split("/")[2])
        return super().get(key)


def test_of_a_thousand_checkpoints_those_nobody_looks_at_are_not_read(tmp_path: Path) -> None:
    store = Told()
    journal = run(store, Keep(), *kept(store, tmp_path, 5, 6, 1))
    result = result_of(journal.view, store)
    assert result.checkpoint is not None
    assert store.read == ["c2"], "the latest"
    assert names(result.best_checkpoints) == ["c0", "c1", "c2"]
    assert result.best_checkpoints is result.best_checkpoints
    assert sorted(store.read) == ["c0", "c1", "c2", "c2"], "once looked at, and once only"


def test_what_nobody_has_looked_at_survives_a_pickle(store: Store, tmp_path: Path) -> None:
    journal = run(store, Keep(), *kept(store, tmp_path, 5, 6))
    again = pickle.loads(pickle.dumps(result_of(journal.view, store)))
    assert names(again.best_checkpoints) == ["c0", "c1"]


def test_metrics_are_the_last_reported(store: Store, tmp_path: Path) -> None:
    checkpoints = kept(store, tmp_path, 5)
    journal = run(store, Keep(), *checkpoints, FitEnded("finished", metrics={"loss": 0.1}))
    assert result_of(journal.view, store).metrics == {"loss": 0.1}


def test_metrics_of_a_fit_that_reported_nothing_are_those_of_the_checkpoint(
    store: Store, tmp_path: Path
) -> None:
    journal = run(store, Keep(), *kept(store, tmp_path, 5), FitEnded("finished"))
    assert result_of(journal.view, store).metrics == {"eval": {"score": 5}}


def validated(store: Store, tmp_path: Path, last: dict[str, Any]) -> Result:
    """A checkpoint of which a validation changed one metric and added one; then the end."""
    (commit,) = kept(store, tmp_path, 5)
    asked = structs.replace(commit, validation=ValidationAsked(), metrics={"loss": 1.0, "step": 3})
    found = ValidationEnded("c0", asked.mark, "validated", {"acc": 0.5, "loss": 2.0})
    journal = run(store, Keep(), asked, found, FitEnded("finished", metrics=last))
    return result_of(journal.view, store)


def test_what_a_validation_found_is_among_the_metrics(store: Store, tmp_path: Path) -> None:
    result = validated(store, tmp_path, {"loss": 1.0, "step": 3})
    assert result.metrics == {"loss": 2.0, "step": 3, "acc": 0.5}
    assert result.best_checkpoints is not None
    assert result.best_checkpoints[0][1] == result.metrics


def test_but_not_among_those_of_a_later_report(store: Store, tmp_path: Path) -> None:
    assert validated(store, tmp_path, {"loss": 1.0, "step": 4}).metrics == {"loss": 1.0, "step": 4}


def test_metrics_alone_make_a_result(store: Store) -> None:
    ended = FitEnded("finished", metrics={"loss": {"__float__": "inf"}})
    result = result_of(run(store, Keep(), ended).view, store)
    assert (result.metrics, result.checkpoint) == ({"loss": float("inf")}, None)
    assert result.best_checkpoints == []
    assert result.metrics_dataframe is None


def test_it_can_be_read_again_with_everything_that_is_kept(store: Store, tmp_path: Path) -> None:
    run(store, BEST_TWO, *kept(store, tmp_path, 5, 6, 1))
    folder = tmp_path / "results" / "run"
    for path in (folder, f"{folder}/", f"file://{folder}"):
        result = Result.from_path(path)
        assert names(result.best_checkpoints) == ["c2", "c0", "c1"]
        assert result.return_value is None


def test_in_a_file_system_of_the_user_s_everything_is_as_it_says(
    store: Store, tmp_path: Path
) -> None:
    run(store, BEST_TWO, *kept(store, tmp_path, 5, 6, 1))
    mine = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    result = Result.from_path("results/run/", mine)
    again = Result.from_path(result.path or "", result.filesystem)
    for one in (result, again):
        assert (one.path, one.filesystem) == ("results/run", mine)
        assert one.checkpoint is not None
        assert (one.checkpoint.path, one.checkpoint.filesystem) == ("results/run/c2", mine)
    info = mine.get_file_info(f"{result.checkpoint.path}/model")  # type: ignore[union-attr]
    assert info.size == 1


def test_without_a_run_in_a_bucket_the_file_system_is_the_local_one() -> None:
    assert isinstance(Result({}, None, None, None).filesystem, fs.LocalFileSystem)


def test_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="doesn't exist"):
        Result.from_path(tmp_path / "gone")


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("hello")
    with pytest.raises(RuntimeError, match="Failed to restore"):
        Result.from_path(tmp_path)


def test_a_broken_journal_says_so(store: Store, tmp_path: Path) -> None:
    store.put(".spotfit/journal/00000000000000000000.json", b'{"run')
    with pytest.raises(RuntimeError, match=r"Failed to restore.*(?s:.)*Entry 0"):
        Result.from_path(tmp_path / "results" / "run")


def test_a_listed_checkpoint_that_is_gone_says_so(store: Store, tmp_path: Path) -> None:
    run(store, Keep(), *kept(store, tmp_path, 5, 6))
    store.delete("c0/model")
    with pytest.raises(IntegrityError, match="'model' of checkpoint c0"):
        Result.from_path(tmp_path / "results" / "run")


def test_what_its_user_has_written_over_is_none_any_more_and_refuses_nothing(
    store: Store, tmp_path: Path
) -> None:
    """Its record outlives it until somebody drops it, be it after a crash."""
    events = []
    for n, (name, model) in enumerate((("mine", "old"), ("mine@1-1", "newer"))):
        store.put("mine/model", model.encode())
        record(store, structs.replace(part(name, report=n), at="mine"))
        events.append(CheckpointCommitted(name, 1, n, {"n": n}, (0,), at="mine"))
    run(store, Keep(2), *events)
    result = Result.from_path(tmp_path / "results" / "run")
    assert result.best_checkpoints is not None
    assert [(names([one]), one[1]["n"]) for one in result.best_checkpoints] == [(["mine"], 1)]
    with result.best_checkpoints[0][0].as_directory() as folder:
        assert Path(folder, "model").read_text() == "newer"


def test_the_best_by_any_metric(store: Store, tmp_path: Path) -> None:
    journal = run(store, Keep(), *kept(store, tmp_path, 5, {"__float__": "nan"}, 1, 7))
    result = result_of(journal.view, store)

    def best(mode: str) -> str:
        found = result.get_best_checkpoint("eval/score", mode)
        assert found is not None
        return Path(found.path).name

    assert (best("max"), best("min")) == ("c3", "c2")
    with pytest.raises(RuntimeError, match="Invalid metric name 'loss'"):
        result.get_best_checkpoint("loss", "max")
    with pytest.raises(ValueError, match="mode must be"):
        result.get_best_checkpoint("eval/score", "best")
    with pytest.raises(ValueError, match="only numbers can be compared"):
        result.get_best_checkpoint("eval", "max")


def test_without_checkpoints_none_is_the_best() -> None:
    with pytest.raises(RuntimeError, match="No checkpoint"):
        Result({}, None, None, None).get_best_checkpoint("loss", "max")


def test_the_config_is_no_more() -> None:
    with pytest.raises(DeprecationWarning):
        Result({}, None, None, None).config  # noqa: B018


def test_a_table_has_a_row_for_each_of_the_best(store: Store, tmp_path: Path) -> None:
    journal = run(store, BEST_TWO, *kept(store, tmp_path, 5, 6, 1))
    result = result_of(journal.view, store)
    table = result.metrics_dataframe
    assert [row["score"] for row in table["eval"]] == [5, 6], "nested metrics stay dictionaries"
    assert result.metrics_dataframe is table, "made once"


def test_a_table_without_pandas_says_what_to_install(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    result = result_of(run(store, Keep(), *kept(store, tmp_path, 5)).view, store)
    with pytest.raises(ImportError, match="pandas") as missing:
        result.metrics_dataframe  # noqa: B018
    assert "spotfit[pandas]" in str(missing.value)


def test_a_run_directory_can_be_moved(store: Store, tmp_path: Path) -> None:
    run(store, BEST_TWO, *kept(store, tmp_path, 5, 6, 1))
    (tmp_path / "results" / "run").rename(tmp_path / "archive")
    result = Result.from_path(tmp_path / "archive")
    assert result.path == str(tmp_path / "archive")
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert Path(folder, "model").read_text() == "1"


def test_what_a_failed_run_has_raised_can_be_read_again(store: Store, tmp_path: Path) -> None:
    failed = FitEnded(
        "failed", "1 failure", Blame.WORKER, (RankFailure(1, "raised", "KeyError: 'x'"),)
    )
    run(store, Keep(), *kept(store, tmp_path, 5), failed)
    error = Result.from_path(tmp_path / "results" / "run").error
    assert isinstance(error, WorkerGroupError)
    assert list(error.worker_failures) == [1]
    assert "KeyError: 'x'" in str(error)


def test_a_run_that_failed_before_it_reported_anything_says_why(
    store: Store, tmp_path: Path
) -> None:
    run(store, Keep(), FitEnded("failed", "the market gives no machines", Blame.PLATFORM))
    with pytest.raises(RuntimeError, match=r"Failed to restore.* gives no machines"):
        Result.from_path(tmp_path / "results" / "run")


def test_positions_are_those_of_ray_train() -> None:
    table = object()
    result = Result({"a": 1}, None, None, "p", table, [], 7)
    assert (result.metrics, result.path, result.return_value) == ({"a": 1}, "p", 7)
    assert result.metrics_dataframe is table
    assert repr(result).startswith("Result(metrics={'a': 1}, checkpoint=None, error=None, path='p'")
