"""The journal format: the golden journal contains an example of every entry and must always load.

Never edit released golden files. Add a file for a new event, and another one for a new field.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotfit.core.codec import DECODE_ERRORS, decoder, encode
from spotfit.core.ids import AgentId, Token
from spotfit.model.events import FailureCause, FitEnded, JournalEntry, JournalEvent, PreemptedNodes
from spotfit.model.view import JournalView, View, fold
from spotfit.testing.builders import a_committed_checkpoint

GOLDEN = Path(__file__).parents[2] / "golden" / "ledger" / "v1"
FILES = sorted(GOLDEN.glob("*.json"))


def entries() -> list[JournalEntry]:
    return [decoder(JournalEntry).decode(file.read_bytes()) for file in FILES]


def tags() -> set[str]:
    return {kind.__struct_config__.tag for kind in typing.get_args(JournalEvent)}


def test_every_event_type_has_a_golden_file() -> None:
    assert {msgspec.json.decode(file.read_bytes())["event"]["type"] for file in FILES} == tags()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_golden_entry_survives_decode_and_encode(file: Path) -> None:
    event_of = msgspec.json.decode(file.read_bytes())
    again = msgspec.json.decode(encode(decoder(JournalEntry).decode(file.read_bytes())))
    assert_within(event_of, again)


def test_the_golden_journal_folds_to_the_expected_view() -> None:
    view: JournalView = JournalView()
    for entry in entries():
        view = fold(view, entry)
    assert view.next_slot == len(FILES)
    assert isinstance(view, View)
    assert (
        view.spec.name,
        view.spec.failure_limits.worker,
        view.spec.retention.score_attribute,
    ) == (
        "digits",
        1,
        "eval/loss",
    )
    assert view.is_leader(AgentId("a-1"))
    assert (view.network, view.former_network) == ("eu-west-1", "")
    names = [*(f"epoch-{n}" for n in range(2, 7)), "custom@5-5"]
    assert [one.name for one in view.checkpoints] == names
    assert [one.folder for one in view.checkpoints][-2:] == ["epoch-6", "custom"]
    assert view.checkpoints[1].metrics == {"loss": 0.2, "accuracy": 0.9}
    assert (view.unvalidated_checkpoints, view.validation_attempts) == ((), 1)
    assert view.pending_fit_end is not None
    assert view.dropped_checkpoints == ("epoch-1",)
    assert view.failure_counts == {
        FailureCause.PREEMPTION: 3,
        FailureCause.NETWORK: 1,
        FailureCause.LEADER_CHANGE: 1,
        FailureCause.WORKER: 1,
    }
    assert (view.lifetimes.total_count, view.lifetimes.observed_s[3]) == (6, 0.0)
    assert view.last_refusal == "machines for 1 of at least 2 workers were granted"
    assert view.groups[Token("t-9")].waiting_reason == "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
    assert [token for token, group in view.groups.items() if group.active_nodes] == []
    assert view.usage.timed_provisioners == ("local",)
    assert [one.name for one in view.usage.offers.values()] == ["eu-1a/spot"]
    assert view.lost_agents == {"a-9"}, "reset by the next round"
    assert view.cancel_reason == "cancel() was called"
    assert isinstance(view.fit_end, FitEnded)
    assert (view.fit_end.is_time_budget, view.elapsed_s) == (True, 3600.5)
    assert view.fit_end.result_key == ".spotfit/results/1-0.pkl"
    assert view.fit_end.preempted == PreemptedNodes(
        node_to_ranks={"t-1/0": (0, 1)}, deadline_ms=1_767_225_720_000, drain_timed_out=True
    )


def test_requested_name_omits_the_uid_suffix() -> None:
    again, other = (
        a_committed_checkpoint("last@2-7", round=2, report_index=7),
        a_committed_checkpoint("last@2-7", round=3, report_index=7),
    )
    assert [one.requested_name for one in (again, other)] == ["last", "last@2-7"]


def test_an_unknown_field_is_ignored() -> None:
    event_of = msgspec.json.decode(FILES[0].read_bytes())
    event_of["event"]["spec"]["colour"] = "blue"
    event_of["unknown_field"] = "ignored"
    assert decoder(JournalEntry).decode(encode(event_of)) == entries()[0]


def test_an_unknown_event_type_raises() -> None:
    event_of = msgspec.json.decode(FILES[0].read_bytes())
    event_of["event"]["type"] = "moon_landed"
    with pytest.raises(DECODE_ERRORS, match="moon_landed"):
        decoder(JournalEntry).decode(encode(event_of))


def assert_within(part: Any, complete: Any) -> None:
    """Every field of `part` is in `complete` with the same value; `complete` may have more."""
    if isinstance(part, dict):
        for key, value in part.items():
            assert_within(value, complete[key])
    elif isinstance(part, list):
        assert len(part) == len(complete)
        for one, other in zip(part, complete, strict=True):
            assert_within(one, other)
    else:
        assert part == complete
