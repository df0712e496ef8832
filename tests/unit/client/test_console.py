"""Console output: every line of every worker once, with its rank, despite store failures."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from spotfit.client import console as consoles
from spotfit.client.console import (
    CheckpointThrottle,
    RunConsole,
    WaitReminder,
    WorkerLogTailer,
    format_log_line,
    read_event_lines,
)
from spotfit.core.codec import encode
from spotfit.core.errors import TransientStoreError
from spotfit.core.ids import Token
from spotfit.host import system
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.ledger.keys import VALIDATION_RANK
from spotfit.model.bill import OfferBill
from spotfit.model.events import (
    CheckpointCommitted,
    CheckpointDropped,
    DeadlineAtRisk,
    FailureCause,
    FitEnded,
    FitStarted,
    GroupsReleased,
    JournalEvent,
    NodeLost,
    RoundOpened,
    ValidationRequest,
    ValidationStarted,
)
from spotfit.model.view import JournalView, View
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import (
    RUN_ID,
    TOKEN,
    a_committed_checkpoint,
    a_group,
    a_round,
    a_spec,
    a_view,
    an_agent_id,
    an_entry,
)
from tests.unit.client.bills import LOCAL, SPOT, a_bill
from tests.unit.store.faulty_stores import DamagedResponses

A, B = an_agent_id(0), an_agent_id(1)


class FailingStore(MemoryStore):
    """Raises when the object `fails_at` is read."""

    fails_at = ""

    def get(self, key: str) -> bytes:
        if key == self.fails_at:
            raise TransientStoreError("no answer")
        return super().get(key)


class RecordingStore(MemoryStore):
    """Records the keys that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_keys: list[str] = []

    def get(self, key: str) -> bytes:
        self.read_keys.append(key)
        return super().get(key)


def lines(*texts: str, rank: int = 0) -> bytes:
    return b"".join(encode({"rank": rank, "text": text}) + b"\n" for text in texts)


END = encode({"end": True}) + b"\n"


def texts(output: WorkerLogTailer) -> list[str]:
    return [line["text"] for line in output.read_new_lines()]


def test_reading_continues_after_the_last_line() -> None:
    store = MemoryStore()
    output = WorkerLogTailer(store)
    output.add_agent(A)
    assert texts(output) == []
    store.put(keys.logs(A, 0), lines("one", "two"))
    store.put(keys.logs(A, 1), lines("three"))
    assert texts(output) == ["one", "two", "three"]
    store.put(keys.logs(A, 2), lines("four"))
    assert texts(output) == ["four"]


@pytest.mark.parametrize("line", [b"\xff", b'{"rank":', b'{"text":[]}', b"7", b"[" * 5000])
def test_a_corrupt_line_is_reported_and_the_others_are_read(line: bytes) -> None:
    store = MemoryStore()
    output = WorkerLogTailer(store)
    output.add_agent(A)
    store.put(keys.logs(A, 0), lines("one") + line + b"\n" + lines("two") + END)
    first, corrupt, last = map(format_log_line, output.read_new_lines())
    assert (first, last) == ("(rank 0) one", "(rank 0) two")
    assert corrupt == f"(run) [spotfit] A line of the log {keys.logs(A, 0)} is corrupt."
    assert output.is_complete


def test_a_log_is_read_again_if_its_first_read_is_damaged() -> None:
    store = DamagedResponses()
    output = WorkerLogTailer(store)
    output.add_agent(A)
    store.put(keys.logs(A, 0), lines("one", "two").rstrip())
    assert texts(output) == ["one", "two"]


def test_add_agent_is_idempotent() -> None:
    store = MemoryStore()
    output = WorkerLogTailer(store)
    store.put(keys.logs(A, 0), lines("one"))
    output.add_agent(A)
    assert texts(output) == ["one"]
    output.add_agent(A)
    assert texts(output) == []


def test_only_added_agents_are_read() -> None:
    store = MemoryStore()
    store.put(keys.logs(B, 0), lines("hidden"))
    output = WorkerLogTailer(store)
    output.add_agent(A)
    assert texts(output) == []


def test_output_is_complete_when_every_agent_wrote_its_end_marker() -> None:
    store = MemoryStore()
    output = WorkerLogTailer(store)
    completed = [output.is_complete]
    output.add_agent(A)
    output.add_agent(B)
    store.put(keys.logs(A, 0), lines("bye") + END)
    assert texts(output) == ["bye"]
    completed.append(output.is_complete)
    store.put(keys.logs(B, 0), END)
    assert texts(output) == []
    completed.append(output.is_complete)
    assert completed == [True, False, True], "without agents the output is complete"


def test_lost_agents_are_polled_a_limited_number_of_times() -> None:
    store = RecordingStore()
    output = WorkerLogTailer(store)
    output.add_agent(A)
    output.add_agent(B)
    output.mark_lost(A)
    store.put(keys.logs(A, 0), lines("last line"))
    assert texts(output) == ["last line"]
    for _ in range(20):
        assert texts(output) == []
    assert store.read_keys.count(keys.logs(A, 1)) == 10
    assert store.read_keys.count(keys.logs(B, 0)) == 21, "other agents are polled indefinitely"
    assert not output.is_complete
    output.mark_lost(B)
    for _ in range(10):
        assert texts(output) == []
    assert output.is_complete


def test_output_is_complete_without_the_end_marker_of_lost_machines() -> None:
    console = RunConsole(MemoryStore())
    console.on_entry(0, b"", an_entry(RoundOpened(round=a_round())))
    for node, agent in enumerate((A, B)):
        console.on_entry(
            1,
            b"",
            an_entry(
                NodeLost(
                    token=TOKEN,
                    node=node,
                    agent=agent,
                    reason="reclaimed",
                    cause=FailureCause.PREEMPTION,
                )
            ),
        )
    console.on_entry(
        2, b"", an_entry(NodeLost(token=TOKEN, node=2, agent=None, reason="it never joined"))
    )
    assert not console.is_complete
    for _ in range(10):
        console.show_new_lines()
    assert console.is_complete


def test_a_store_failure_loses_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    store = FailingStore()
    console = RunConsole(store)
    console.on_entry(0, b"", an_entry(RoundOpened(round=a_round())))
    store.put(keys.logs(A, 0), lines("one"))
    store.put(keys.logs(A, 1), lines("two"))
    store.fails_at = keys.logs(A, 1)
    console.show_new_lines()
    store.fails_at = ""
    console.show_new_lines()
    assert capsys.readouterr().out == "(rank 0) one\n(rank 0) two\n"


def test_a_stored_line_cannot_control_the_terminal_or_forge_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = MemoryStore()
    console = RunConsole(store)
    console.follow_round(a_round())
    store.put(keys.logs(A, 0), lines("\x1b[2J\x1b[31mone\n(rank 1) forged\r\x9b2K"))
    console.show_new_lines()
    assert capsys.readouterr().out == "(rank 0) one (rank 1) forged\n"


def test_lines_of_other_processes_show_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    store = MemoryStore()
    console = RunConsole(store)
    console.follow_round(a_round())
    store.put(keys.logs(A, 0), lines("a callback", rank=-1) + lines("rank 1 hangs", rank=-2) + END)
    console.show_new_lines()
    assert capsys.readouterr().out == "(sidecar) a callback\n(run) rank 1 hangs\n"


def test_a_waiting_run_is_reported_periodically(capsys: pytest.CaptureFixture[str]) -> None:
    console = RunConsole(MemoryStore())
    waiting = a_view(spec=a_spec(min_workers=3, max_workers=4), last_refusal="no capacity")
    for now in (0.0, 29.9):
        console.show_reminder(waiting, now)
    assert capsys.readouterr().err == ""
    console.show_reminder(waiting, 30.0)
    console.show_reminder(waiting, 59.9)
    [line] = capsys.readouterr().err.splitlines()
    assert (
        "waiting for machines: 2 of at least 3 workers have a running or requested machine" in line
    )
    assert "last refusal: no capacity" in line
    console.show_reminder(waiting, 60.0)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_reason_of_the_backend_is_repeated_while_a_run_waits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = RunConsole(MemoryStore())
    group = a_group(waiting_reason="CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY")
    waiting = a_view(spec=a_spec(min_workers=3, max_workers=4), groups={TOKEN: group})
    for now in (0.0, 30.0, 60.0):
        console.show_reminder(waiting, now)
    lines = capsys.readouterr().err.splitlines()
    reason = "the backend reports: CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
    assert [reason in line for line in lines] == [True, True]


@pytest.mark.parametrize(
    "busy", [a_view(round=a_round()), a_view(fit_end=FitEnded(outcome="finished")), JournalView()]
)
def test_a_running_or_ended_run_is_not_reported_as_waiting(busy: View) -> None:
    reminder = WaitReminder()
    assert reminder.next_message(a_view(), 0.0) is None
    assert reminder.next_message(busy, 29.0) is None
    assert reminder.next_message(a_view(), 31.0) is None, "waiting has just started"
    assert reminder.next_message(a_view(), 61.0) is not None


def test_workers_that_start_slowly_are_reported() -> None:
    reminder, starting = WaitReminder(), a_view(round=a_round(3), spec=a_spec(framework="torch"))
    reminder.next_message(a_view(), 0.0)
    assert reminder.next_message(starting, 29.0) is None
    assert reminder.next_message(starting, 33.9) is None
    assert reminder.next_message(starting, 34.0) == (
        "round 3: the workers import torch, load the training function and join their process "
        "group; it was not called on all ranks yet"
    )
    assert reminder.next_message(starting, 63.9) is None
    assert reminder.next_message(starting, 64.0) is not None


def test_no_start_is_reported_once_the_training_function_was_called() -> None:
    reminder, started = WaitReminder(), a_view(round=a_round(), round_startup_s=1.5)
    assert [reminder.next_message(started, now) for now in (0.0, 5.0, 30.0)] == [None] * 3


def test_pending_validations_are_reported() -> None:
    left = (a_committed_checkpoint("c1", validation=ValidationRequest()),)
    waiting = a_view(pending_fit_end=FitEnded(outcome="finished"), unvalidated_checkpoints=left)
    reminder = WaitReminder()
    reminder.next_message(waiting, 0.0)
    assert reminder.next_message(waiting, 30.0) == "training has ended; 1 validations are pending"


def test_output_of_a_validator_is_shown_until_its_machine_is_released(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = MemoryStore()
    console = RunConsole(store)
    store.put(keys.logs(A, 0), lines("looking", rank=VALIDATION_RANK))
    console.on_entry(
        3,
        b"",
        an_entry(
            ValidationStarted(
                checkpoint_name="c1",
                checkpoint_uid="1-0",
                attempt=1,
                agent=A,
                token=Token("t-v"),
                node=0,
            )
        ),
    )
    console.show_new_lines()
    assert capsys.readouterr().out == "(validation) looking\n"
    assert not console.is_complete
    console.on_entry(
        4, b"", an_entry(GroupsReleased(token=Token("t-1"), other_tokens=(Token("t-v"),)))
    )
    for _ in range(20):
        console.show_new_lines()
    assert console.is_complete, "waiting for its end marker is limited"


def test_output_of_a_replaced_machine_is_awaited_until_it_is_released(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = MemoryStore()
    console = RunConsole(store)
    console.on_entry(0, b"", an_entry(RoundOpened(round=a_round())))
    console.on_entry(
        1, b"", an_entry(NodeLost(token=TOKEN, node=0, agent=A, reason="it was replaced"))
    )
    for _ in range(20):
        console.show_new_lines()
    store.put(keys.logs(A, 0), lines("last line"))
    console.show_new_lines()
    assert capsys.readouterr().out == "(rank 0) last line\n"


def test_output_of_all_workers_of_a_round_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    store = MemoryStore()
    console = RunConsole(store)
    store.put(keys.logs(B, 0), lines("hello", rank=1) + END)
    store.put(keys.logs(A, 0), END)
    console.show_new_lines()
    assert capsys.readouterr().out == ""
    console.on_entry(
        3, b"", an_entry(RoundOpened(round=a_round(), reason="2 workers on 2 machines"))
    )
    console.show_new_lines()
    out, err = capsys.readouterr()
    assert out == "(rank 1) hello\n"
    assert "round 1 started: 2 workers on 2 machines" in err
    assert console.is_complete


# --- progress ------------------------------------------------------------------------------------


def write_report(store: MemoryStore, index: int, **metrics: object) -> None:
    line = {"round": 1, "report_index": index, "checkpoint": None, "metrics": metrics}
    store.put(keys.reports(A, index), encode(line))


def test_a_deadline_at_risk_is_a_warning_with_its_remedy(caplog: pytest.LogCaptureFixture) -> None:
    risk = DeadlineAtRisk(risk="late", reason="7.0 h are left", remedy="Use more workers.")
    RunConsole(MemoryStore()).on_entry(0, b"", an_entry(risk))
    (record,) = caplog.records
    assert (record.levelname, record.msg) == ("WARNING", "deadline.at_risk")
    assert (vars(record)["reason"], vars(record)["do"]) == ("7.0 h are left", "Use more workers.")


def test_the_progress_is_shown_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="spotfit")
    store = FailingStore()
    console, view = RunConsole(store), a_view(round=a_round())

    def shown(now: float) -> list[str]:
        caplog.clear()
        console.show_progress(view, now)
        return [vars(one)["text"] for one in caplog.records if one.msg == "run.progress"]

    assert shown(0.0) == []
    assert shown(61.0) == [], "no report yet"
    write_report(store, 0, step=7, loss=0.5)
    assert shown(90.0) == []
    assert shown(122.0) == ["step 7, loss=0.5"]
    assert shown(190.0) == [], "no new report"
    write_report(store, 1, step=8, loss=0.25)
    store.fails_at = keys.reports(A, 1)
    assert shown(260.0) == []
    assert caplog.records[0].msg == "output.unreadable"
    store.fails_at = ""
    assert shown(330.0) == ["step 8, loss=0.25"]


def test_the_progress_has_the_elapsed_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="spotfit")
    store = MemoryStore()
    write_report(store, 0, step=7)
    console = RunConsole(store)
    view = a_view(round=a_round(), fit_started_at_ms=1_000)
    monkeypatch.setattr(system, "wall_ms", lambda: 91_000)
    for now in (0.0, 61.0):
        console.show_progress(view, now)
    assert [vars(one)["text"] for one in caplog.records] == ["after 90 s: step 7"]


@pytest.mark.parametrize(
    ("provisioner", "cost"),
    [("aws_batch", "; cost: $12.40 (at most $12.55) so far"), ("local", "")],
)
def test_the_live_output_has_the_cost_so_far(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, provisioner: str, cost: str
) -> None:
    caplog.set_level("INFO", logger="spotfit")
    offers = (LOCAL,) if provisioner == "local" else ()
    monkeypatch.setattr(consoles, "bill_of", lambda *_: a_bill(*offers, is_final=False))
    store, spec = MemoryStore(), a_spec(provisioner=provisioner)
    write_report(store, 0, step=7)
    console = RunConsole(store)
    for now in (0.0, 61.0):
        console.show_progress(a_view(round=a_round(), spec=spec), now)
        console.show_reminder(a_view(spec=spec), now)
    progress, waiting = [vars(one)["text"] for one in caplog.records]
    assert progress == f"step 7{cost}"
    assert waiting.startswith("waiting for machines: ")
    assert waiting.partition("; cost")[2] == cost.partition("; cost")[2]


@pytest.mark.parametrize(("provisioner", "offer"), [("aws_batch", SPOT), ("local", LOCAL)])
def test_the_events_of_a_run_end_with_its_cost(
    monkeypatch: pytest.MonkeyPatch, provisioner: str, offer: OfferBill
) -> None:
    monkeypatch.setattr(consoles, "bill_of", lambda *_: a_bill(offer))
    ledger = Ledger(MemoryStore(), RUN_ID, an_agent_id(0))
    ledger.append(FitStarted(spec=a_spec(provisioner=provisioner)), after=ledger.catch_up())
    first, *rest = read_event_lines(ledger.store)
    assert "run 'digits' started" in first
    shown = "cost: $4.15 (at most $4.30); on demand $32.85, saved 87 %; 16.2 machine-hours"
    assert rest == ([] if provisioner == "local" else [shown])


@pytest.mark.parametrize("tag", ["machines_observed", "prices_changed"])
def test_what_is_recorded_for_the_bill_is_not_shown(
    caplog: pytest.LogCaptureFixture, tag: str
) -> None:
    caplog.set_level("DEBUG", logger="spotfit")
    event: Any = msgspec.defstruct("Recorded", [], tag=tag)()
    entry: Any = SimpleNamespace(event=event)
    RunConsole(MemoryStore()).on_entry(0, b"", entry)
    assert [(one.levelname, vars(one)["type"]) for one in caplog.records] == [("DEBUG", tag)]


def committed(name: str) -> CheckpointCommitted:
    return CheckpointCommitted(
        name=name, round=1, report_index=0, metrics={}, ranks=(0,), size_bytes=1
    )


def test_checkpoints_are_shown_at_most_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="spotfit")
    console, view = RunConsole(MemoryStore()), a_view()

    def shown(now: float, *events: JournalEvent) -> list[str]:
        caplog.clear()
        for event in events:
            console.on_entry(0, b"", an_entry(event))
        console.show_progress(view, now)
        return [vars(one)["text"] for one in caplog.records]

    assert shown(0.0, committed("c1")) == ["checkpoint c1 committed (1 B)"]
    assert shown(1.0, committed("c2"), CheckpointDropped(name="c1", reason="x")) == []
    assert shown(30.0, committed("c3")) == []
    assert shown(61.0) == ["2 checkpoints committed, the latest is c3"]
    assert shown(62.0, committed("c4")) == []
    ended = FitEnded(outcome="finished", reason="")
    assert shown(63.0, ended) == ["1 checkpoint committed, the latest is c4", "run finished"]


def test_a_checkpoint_after_a_quiet_minute_is_shown() -> None:
    throttle = CheckpointThrottle()
    event = committed("c")
    assert throttle.is_shown(event)
    assert [throttle.next_message(now) for now in (0.0, 61.0)] == ["", ""]
    assert throttle.is_shown(event)


def test_without_a_round_no_progress_is_read() -> None:
    store = RecordingStore()
    console = RunConsole(store)
    for now in (0.0, 100.0, 200.0):
        console.show_progress(a_view(), now)
    assert store.read_keys == []


# --- order ---------------------------------------------------------------------------------------


def timed(*times: int) -> bytes:
    return b"".join(encode({"rank": 0, "t": t, "text": str(t)}) + b"\n" for t in times)


def test_lines_of_several_agents_are_ordered_by_time() -> None:
    store = MemoryStore()
    output = WorkerLogTailer(store)
    for agent in (A, B):
        output.add_agent(agent)
    store.put(keys.logs(A, 0), timed(1, 4))
    store.put(keys.logs(A, 1), timed(6))
    store.put(keys.logs(B, 0), timed(2, 3, 5, 7) + END)
    assert texts(output) == ["1", "2", "3", "4", "5", "6", "7"]


def test_no_line_is_lost_or_repeated_if_the_store_fails() -> None:
    store = FailingStore()
    output = WorkerLogTailer(store)
    for agent in (A, B):
        output.add_agent(agent)
    store.put(keys.logs(A, 0), timed(1, 4))
    store.put(keys.logs(B, 0), timed(2, 3, 5))
    received: list[str] = []
    for fails_at in (keys.logs(A, 1), keys.logs(B, 1)):
        store.fails_at = fails_at
        with pytest.raises(TransientStoreError):
            received.extend(line["text"] for line in output.read_new_lines())
    store.fails_at = ""
    received += texts(output)
    assert received == ["1", "2", "3", "4", "5"]


def test_a_standard_output_that_only_writes_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts replace sys.stdout by an object that copies the output to a file."""

    class Tee:
        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    tee = Tee()
    monkeypatch.setattr(sys, "stdout", tee)
    RunConsole(MemoryStore()).write_text("\x1b[31mloss 1.0")
    assert tee.text == "loss 1.0\n"
