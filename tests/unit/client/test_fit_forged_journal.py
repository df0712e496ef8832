"""`fit()`, `attach()` and results of a run whose storage another process can write to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotfit.client import fit, run_handle
from spotfit.client.fit import start_run
from spotfit.client.keyring import RunKeyring
from spotfit.client.result import Result
from spotfit.client.run_handle import attach, supervise_run
from spotfit.code.code_bundle import upload_code_bundle
from spotfit.core.errors import ConfigError, JournalError, RunActiveError, RunCancelledError
from spotfit.core.ids import Token
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.events import FitEnded, FitStarted, GroupPlanned, JournalEvent
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.model.view import View
from spotfit.store.factory import open_store
from spotfit.testing.builders import RUN_ID, a_committed_checkpoint, a_spec, an_agent_id
from tests.unit.client.harness import ClientHarness

TOKEN = Token("t-forged")


@pytest.fixture
def opened(harness: ClientHarness, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the provisioners that handles open."""
    names: list[str] = []

    def open_recorded(name: str, _options: Any) -> Any:
        names.append(name)
        return harness.cloud

    monkeypatch.setattr(run_handle, "open_provisioner", open_recorded)
    return names


def append_without_key(harness: ClientHarness, *events: JournalEvent) -> None:
    """Append entries as a process that has read the journal, but has no key."""
    ledger = Ledger(open_store(harness.url), harness.view.run_id, an_agent_id(9))
    for event in events:
        ledger.append(event, after=ledger.catch_up())


def forged_plan() -> GroupPlanned:
    plan = GroupPlan(
        token=TOKEN, provisioner="ssh", num_nodes=1, slots_per_node=1, body={"command": "sh"}
    )
    return GroupPlanned(
        request=GroupRequest(token=TOKEN, num_workers=1, total_workers=1), plan=plan
    )


def test_attach_opens_the_provisioner_of_the_authentic_fit(
    harness: ClientHarness, opened: list[str]
) -> None:
    start_run(harness.request())
    submitted = list(harness.cloud.submitted_tokens)
    append_without_key(harness, FitStarted(spec=a_spec(provisioner="ssh")), forged_plan())
    opened.clear()
    handle = attach(harness.url)
    handle.supervise_once()
    assert opened == ["local"]
    assert harness.cloud.submitted_tokens == submitted
    supervise_run(harness.url, duration_s=1.0)
    assert harness.cloud.submitted_tokens == submitted


def test_attach_without_the_key_opens_no_provisioner(
    harness: ClientHarness, opened: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start_run(harness.request())
    opened.clear()
    monkeypatch.setenv("SPOTFIT_HOME", str(tmp_path / "elsewhere"))
    assert not attach(harness.url).status().is_verified
    assert opened == []


def test_fit_does_not_continue_a_run_whose_key_is_not_here(
    harness: ClientHarness, opened: list[str]
) -> None:
    """The journal of another user, or one that was written before the first `fit()`."""
    ledger = Ledger(open_store(harness.url), RUN_ID, an_agent_id(9))
    ledger.append(FitStarted(spec=a_spec(provisioner="ssh")), after=ledger.catch_up())
    ledger.append(forged_plan(), after=ledger.catch_up())
    ledger.append(FitEnded(outcome="failed"), after=ledger.catch_up())
    with pytest.raises(ConfigError, match="this computer has no key of it") as error:
        start_run(harness.request())
    assert RUN_ID in error.value.do
    assert (opened, harness.cloud.submitted_tokens) == ([], [])
    assert RunKeyring().find(RUN_ID) is None, "no key is made for a run that the bucket names"


def test_fit_refuses_a_forged_journal_that_names_a_run_of_this_user(
    harness: ClientHarness, opened: list[str]
) -> None:
    RunKeyring().create(RUN_ID, url=harness.url)
    ledger = Ledger(open_store(harness.url), RUN_ID, an_agent_id(9))
    ledger.append(FitStarted(spec=a_spec(provisioner="ssh")), after=ledger.catch_up())
    with pytest.raises(JournalError, match=r"Journal entry 0 in .* is not authentic"):
        start_run(harness.request())
    with pytest.raises(JournalError, match=r"Journal entry 0 in .* is not authentic"):
        attach(harness.url)
    assert opened == []


def test_two_concurrent_fits_of_one_name_start_one_run(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found an empty folder and created keys of their own."""

    def upload_slowly(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(fit, "upload_code_bundle", upload_code_bundle)
        start_run(harness.request())
        return upload_code_bundle(*arguments, **named)

    monkeypatch.setattr(fit, "upload_code_bundle", upload_slowly)
    with pytest.raises(RunActiveError, match="Another process started a run"):
        start_run(harness.request())
    assert harness.view.fit_count == 1


def test_a_changed_last_entry_is_not_silently_ignored_by_the_result(
    harness: ClientHarness,
) -> None:
    start_run(harness.request())
    harness.append_as_agent(FitEnded(outcome="finished", metrics={"loss": 1.0}))
    assert Result.from_path(harness.url).metrics == {"loss": 1.0}
    store = open_store(harness.url)
    last = max(found.key for found in store.list(keys.JOURNAL.rstrip("/")))
    store.put(last, store.get(last).replace(b"1.0", b"9.0"))
    slot = int(last.rpartition("/")[2].removesuffix(".json"))
    with pytest.raises(RuntimeError, match=rf"Journal entry {slot} in .* is not authentic"):
        Result.from_path(harness.url)


def test_a_driver_can_cancel_a_run_whose_first_entry_was_changed(harness: ClientHarness) -> None:
    """It has read the entry before; a process that reads it for the first time raises."""
    handle = start_run(harness.request())
    store = open_store(harness.url)
    store.put(
        keys.entry(0), store.get(keys.entry(0)).replace(b'"min_workers":2', b'"min_workers":9')
    )
    with pytest.raises(JournalError, match="Journal entry 0"):
        attach(harness.url)
    handle.cancel("no longer needed")
    handle.supervise_once()
    with pytest.raises(RunCancelledError):
        handle.result(timeout_s=60)


def test_a_forged_result_is_not_returned(harness: ClientHarness) -> None:
    handle = start_run(harness.request())
    append_without_key(
        harness, a_committed_checkpoint("evil"), FitEnded(outcome="finished", metrics={"loss": 0.0})
    )
    with pytest.raises(TimeoutError):
        handle.result(timeout_s=1.0)
    assert isinstance(harness.view, View)
    assert harness.view.checkpoints == ()


def test_cancel_without_the_key_cancels_the_run(
    harness: ClientHarness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start_run(harness.request())
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SPOTFIT_HOME", str(tmp_path / "elsewhere"))
        attach(harness.url).cancel("no longer needed")
    assert harness.view.cancel_reason == "no longer needed"
    body = open_store(harness.url).get(keys.entry(harness.view.next_slot - 1))
    assert b"hmac-sha256" not in body
