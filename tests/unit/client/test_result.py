"""`Result` is built from the journal, with the fields of Ray Train."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from pyarrow import fs

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.checkpoint.writer import save_existing_files
from spotfit.client import result as results
from spotfit.client.result import Result, build_result
from spotfit.core.codec import encode
from spotfit.core.errors import IntegrityError, WorkerGroupError
from spotfit.core.ids import AgentId, RunId
from spotfit.ledger import keys
from spotfit.ledger.journal import Journal
from spotfit.model.events import (
    CheckpointCommitted,
    FailureCause,
    FitEnded,
    FitStarted,
    JournalEntry,
    JournalEvent,
    RankFailure,
    ValidationEnded,
    ValidationRequest,
)
from spotfit.model.spec import RetentionConfig, RunSpec
from spotfit.store.api import Store
from spotfit.store.factory import open_store
from spotfit.store.local import MemoryStore
from tests.unit.checkpoint.saved_checkpoints import make_manifest, save_checkpoint
from tests.unit.client.bills import a_bill


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "results" / "run")


def run(store: Store, keep: RetentionConfig, *events: JournalEvent) -> Journal:
    """Write the journal of a run."""
    journal = Journal(store)
    for event in (
        FitStarted(
            spec=RunSpec(
                run_id=RunId("r"),
                name="run",
                fit_id="f",
                min_workers=1,
                max_workers=1,
                retention=keep,
            )
        ),
        *events,
    ):
        journal.append(
            JournalEntry(run_id=RunId("r"), author=AgentId("a"), event=event), journal.catch_up()
        )
    return journal


def kept(store: Store, tmp_path: Path, *scores: Any) -> Sequence[CheckpointCommitted]:
    """Checkpoints c0, c1, ... committed with those scores."""
    events = []
    for n, score in enumerate(scores):
        save_checkpoint(
            store, tmp_path / f"c{n}", make_manifest(f"c{n}", report=n), model=str(score)
        )
        events.append(
            CheckpointCommitted(
                name=f"c{n}",
                round=1,
                report_index=n,
                metrics={"eval": {"score": score}},
                ranks=(0,),
            )
        )
    return events


def names(best: list[tuple[Checkpoint, dict[str, Any]]] | None) -> list[str]:
    return [Path(checkpoint.path).name for checkpoint, _ in best or []]


BEST_TWO = RetentionConfig(num_to_keep=2, score_attribute="eval/score")


def test_a_result_has_the_latest_and_the_best_checkpoints(store: Store, tmp_path: Path) -> None:
    journal = run(store, BEST_TWO, *kept(store, tmp_path, 5, 6, 1))
    result = build_result(journal.view, store, return_value=42)
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path).name == "c2", "the latest, not the best"
    assert names(result.best_checkpoints) == ["c0", "c1"], "worst to best, without a bad latest"
    assert (result.return_value, result.error) == (42, None)
    assert result.path == str(tmp_path / "results" / "run")
    assert isinstance(result.filesystem, fs.LocalFileSystem)


class RecordingStore(MemoryStore):
    """Records the keys of manifests that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get(self, key: str) -> bytes:
        if key.startswith(keys.MANIFESTS):
            self.read.append(key.split("/")[2])
        return super().get(key)


def test_manifests_of_best_checkpoints_are_read_lazily(tmp_path: Path) -> None:
    store = RecordingStore()
    journal = run(store, RetentionConfig(), *kept(store, tmp_path, 5, 6, 1))
    result = build_result(journal.view, store)
    assert result.checkpoint is not None
    assert store.read == ["c2"], "the latest"
    assert names(result.best_checkpoints) == ["c0", "c1", "c2"]
    assert result.best_checkpoints is result.best_checkpoints
    assert sorted(store.read) == ["c0", "c1", "c2", "c2"], "manifests are read once, on access"


def test_a_result_can_be_pickled_before_lazy_fields_are_read(store: Store, tmp_path: Path) -> None:
    journal = run(store, RetentionConfig(), *kept(store, tmp_path, 5, 6))
    again = pickle.loads(pickle.dumps(build_result(journal.view, store)))
    assert names(again.best_checkpoints) == ["c0", "c1"]


def test_metrics_are_those_of_the_last_report(store: Store, tmp_path: Path) -> None:
    checkpoints = kept(store, tmp_path, 5)
    journal = run(
        store, RetentionConfig(), *checkpoints, FitEnded(outcome="finished", metrics={"loss": 0.1})
    )
    assert build_result(journal.view, store).metrics == {"loss": 0.1}


def test_without_reports_metrics_are_those_of_the_checkpoint(store: Store, tmp_path: Path) -> None:
    journal = run(store, RetentionConfig(), *kept(store, tmp_path, 5), FitEnded(outcome="finished"))
    assert build_result(journal.view, store).metrics == {"eval": {"score": 5}}


def validated(store: Store, tmp_path: Path, last: dict[str, Any]) -> Result:
    """A checkpoint of which a validation changed one metric and added one; then the end."""
    (commit,) = kept(store, tmp_path, 5)
    commit_with_validation = structs.replace(
        commit, validation=ValidationRequest(), metrics={"loss": 1.0, "step": 3}
    )
    found = ValidationEnded(
        checkpoint_name="c0",
        checkpoint_uid=commit_with_validation.uid,
        status="validated",
        metrics={"acc": 0.5, "loss": 2.0},
    )
    journal = run(
        store,
        RetentionConfig(),
        commit_with_validation,
        found,
        FitEnded(outcome="finished", metrics=last),
    )
    return build_result(journal.view, store)


def test_metrics_contain_the_results_of_the_validation(store: Store, tmp_path: Path) -> None:
    result = validated(store, tmp_path, {"loss": 1.0, "step": 3})
    assert result.metrics == {"loss": 2.0, "step": 3, "acc": 0.5}
    assert result.best_checkpoints is not None
    assert result.best_checkpoints[0][1] == result.metrics


def test_metrics_of_a_later_report_contain_no_validation_results(
    store: Store, tmp_path: Path
) -> None:
    assert validated(store, tmp_path, {"loss": 1.0, "step": 4}).metrics == {"loss": 1.0, "step": 4}


def test_a_result_may_have_metrics_only(store: Store) -> None:
    ended = FitEnded(outcome="finished", metrics={"loss": {"__float__": "inf"}})
    result = build_result(run(store, RetentionConfig(), ended).view, store)
    assert (result.metrics, result.checkpoint) == ({"loss": float("inf")}, None)
    assert result.best_checkpoints == []
    assert result.metrics_dataframe is None


def test_from_path_reads_all_stored_checkpoints(store: Store, tmp_path: Path) -> None:
    run(store, BEST_TWO, *kept(store, tmp_path, 5, 6, 1))
    folder = tmp_path / "results" / "run"
    for path in (folder, f"{folder}/", f"file://{folder}"):
        result = Result.from_path(path)
        assert names(result.best_checkpoints) == ["c2", "c0", "c1"]
        assert result.return_value is None


def test_from_path_uses_the_file_system_of_the_user(store: Store, tmp_path: Path) -> None:
    run(store, BEST_TWO, *kept(store, tmp_path, 5, 6, 1))
    filesystem = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    result = Result.from_path("results/run/", filesystem)
    again = Result.from_path(result.path or "", result.filesystem)
    for one in (result, again):
        assert (one.path, one.filesystem) == ("results/run", filesystem)
        assert one.checkpoint is not None
        assert (one.checkpoint.path, one.checkpoint.filesystem) == ("results/run/c2", filesystem)
    info = filesystem.get_file_info(f"{result.checkpoint.path}/model")  # type: ignore[union-attr]
    assert info.size == 1


def test_a_result_without_path_has_the_local_file_system() -> None:
    assert isinstance(Result({}, None, None, None).filesystem, fs.LocalFileSystem)


def test_a_missing_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="doesn't exist"):
        Result.from_path(tmp_path / "gone")


def test_a_directory_without_a_run_is_reported(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("hello")
    with pytest.raises(RuntimeError, match="Failed to restore"):
        Result.from_path(tmp_path)


def test_a_corrupt_journal_is_reported(store: Store, tmp_path: Path) -> None:
    store.put(".spotfit/journal/00000000000000000000.json", b'{"run')
    with pytest.raises(RuntimeError, match=r"Failed to restore.*(?s:.)*Journal entry 0"):
        Result.from_path(tmp_path / "results" / "run")


def test_a_missing_checkpoint_is_reported(store: Store, tmp_path: Path) -> None:
    run(store, RetentionConfig(), *kept(store, tmp_path, 5, 6))
    store.delete("c0/model")
    with pytest.raises(IntegrityError, match="'model' of checkpoint c0"):
        Result.from_path(tmp_path / "results" / "run")


def test_an_overwritten_checkpoint_is_ignored(store: Store, tmp_path: Path) -> None:
    """Its journal entry remains until the checkpoint is deleted."""
    events = []
    for n, (name, model) in enumerate((("mine", "old"), ("mine@1-1", "newer"))):
        store.put("mine/model", model.encode())
        save_existing_files(
            store, structs.replace(make_manifest(name, report=n), custom_folder="mine")
        )
        events.append(
            CheckpointCommitted(
                name=name,
                round=1,
                report_index=n,
                metrics={"n": n},
                ranks=(0,),
                custom_folder="mine",
            )
        )
    run(store, RetentionConfig(num_to_keep=2), *events)
    result = Result.from_path(tmp_path / "results" / "run")
    assert result.best_checkpoints is not None
    assert [(names([one]), one[1]["n"]) for one in result.best_checkpoints] == [(["mine"], 1)]
    with result.best_checkpoints[0][0].as_directory() as folder:
        assert Path(folder, "model").read_text() == "newer"


def test_get_best_checkpoint_compares_any_metric(store: Store, tmp_path: Path) -> None:
    journal = run(store, RetentionConfig(), *kept(store, tmp_path, 5, {"__float__": "nan"}, 1, 7))
    result = build_result(journal.view, store)

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


def test_get_best_checkpoint_without_checkpoints_raises() -> None:
    with pytest.raises(RuntimeError, match="No checkpoint"):
        Result({}, None, None, None).get_best_checkpoint("loss", "max")


def test_config_is_removed() -> None:
    with pytest.raises(DeprecationWarning):
        Result({}, None, None, None).config  # noqa: B018


def write_reports(store: Store, *metrics: dict[str, Any]) -> None:
    lines = [
        encode({"round": 1, "report_index": n, "checkpoint": None, "metrics": each})
        for n, each in enumerate(metrics)
    ]
    store.put(keys.reports(AgentId("a"), 0), b"\n".join(lines))


def test_the_dataframe_has_a_row_for_each_report(store: Store, tmp_path: Path) -> None:
    journal = run(store, BEST_TWO, *kept(store, tmp_path, 5, 6, 1))
    write_reports(store, {"eval": {"score": 5}}, {"loss": {"__float__": "nan"}}, {"loss": 0.5})
    result = build_result(journal.view, store)
    table = result.metrics_dataframe
    assert table["eval"][0] == {"score": 5}, "nested metrics stay dictionaries"
    assert [str(loss) for loss in table["loss"]] == ["nan", "nan", "0.5"]
    assert result.metrics_dataframe is table, "the dataframe is cached"


def test_the_dataframe_without_pandas_names_the_extra(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    result = build_result(run(store, RetentionConfig(), *kept(store, tmp_path, 5)).view, store)
    write_reports(store, {"loss": 1.0})
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


def test_from_path_reads_the_error_of_a_failed_run(store: Store, tmp_path: Path) -> None:
    failed = FitEnded(
        outcome="failed",
        reason="1 failure",
        cause=FailureCause.WORKER,
        failures=(RankFailure(rank=1, kind="raised", message="KeyError: 'x'"),),
    )
    run(store, RetentionConfig(), *kept(store, tmp_path, 5), failed)
    error = Result.from_path(tmp_path / "results" / "run").error
    assert isinstance(error, WorkerGroupError)
    assert list(error.worker_failures) == [1]
    assert "KeyError: 'x'" in str(error)


@pytest.mark.parametrize("slot", [1, 2])
def test_a_journal_with_a_gap_is_rejected(store: Store, tmp_path: Path, slot: int) -> None:
    """Entries before the gap give the result of an earlier step."""
    run(store, RetentionConfig(), *kept(store, tmp_path, 1, 2, 3))
    store.delete(keys.entry(slot))
    with pytest.raises(RuntimeError, match=f"Failed to restore.* entry {slot} .* is missing"):
        Result.from_path(tmp_path / "results" / "run")


def test_a_failed_run_without_reports_is_reported_with_its_reason(
    store: Store, tmp_path: Path
) -> None:
    run(
        store,
        RetentionConfig(),
        FitEnded(
            outcome="failed", reason="the market gives no machines", cause=FailureCause.PLATFORM
        ),
    )
    with pytest.raises(RuntimeError, match=r"Failed to restore.* gives no machines"):
        Result.from_path(tmp_path / "results" / "run")


def test_a_result_has_the_bill_of_the_run(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = run(store, RetentionConfig(), *kept(store, tmp_path, 1))
    monkeypatch.setattr(results, "wall_ms", lambda: 5_000)
    monkeypatch.setattr(
        results, "bill_of", lambda view, now_ms: a_bill(boot_s=view.next_slot, idle_s=now_ms)
    )
    bill = a_bill(boot_s=journal.view.next_slot, idle_s=5_000)
    assert build_result(journal.view, store).cost == bill
    assert Result.from_path(tmp_path / "results" / "run").cost == bill
    assert build_result(journal.view, store, cost=a_bill()).cost == a_bill()


def test_a_result_without_machines_has_an_empty_bill() -> None:
    cost = Result({}, None, None, None).cost
    assert (cost.machine_s, cost.offers) == (0, ())


def test_positional_arguments_are_those_of_ray_train() -> None:
    table = object()
    result = Result({"a": 1}, None, None, "p", table, [], 7)
    assert (result.metrics, result.path, result.return_value) == ({"a": 1}, "p", 7)
    assert result.metrics_dataframe is table
    assert repr(result).startswith("Result(metrics={'a': 1}, checkpoint=None, error=None, path='p'")
