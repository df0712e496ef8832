"""Which machines a run had tells its journal; what they printed tells their backend."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from spotfit.client import machines
from spotfit.client.machines import ALL, last_words, machines_of, printed
from spotfit.core.errors import ConfigError, ProvisionError, TransientStoreError
from spotfit.core.ids import Token
from spotfit.ledger.run import Ledger
from spotfit.model.events import Blame, Event, FitEnded, FitStarted, Intended, NodeLost, Submitted
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest
from spotfit.provision.output import Said
from spotfit.store.opening import open_store
from spotfit.testing.builders import RUN, a_member, a_spec, an_agent

FIRST, SECOND = Token("t-1"), Token("t-2")


def asked(token: Token, nodes: int) -> Intended:
    plan = GroupPlan(token, "backend", nodes, 1)
    return Intended(GroupRequest(token, nodes, nodes), plan, "because")


class Backend:
    """It keeps what its machines print, or it fails."""

    name = "backend"

    def __init__(self) -> None:
        self.traits = SimpleNamespace(keeps_output=True)
        self.silent: set[int] = set()
        """Nodes that cannot be asked."""

    def said(self, handle: GroupHandle, node: int, *, last: int) -> list[Said]:
        if node in self.silent:
            raise ProvisionError("nobody is at home")
        if handle.token == SECOND:
            return []
        return [Said("attempt 1", (f"no module, says {node}", "that is all")[-last:])]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A run of two groups: of the first both machines are lost, and one of them had spoken."""
    store = open_store(str(tmp_path))
    ledger = Ledger(store, RUN, an_agent(0))
    Ledger(store, RUN, an_agent(1)).offer(a_member(1, agent=an_agent(1), token=FIRST, node=1))
    events: list[Event] = [
        FitStarted(a_spec(storage_url=str(tmp_path))),
        asked(FIRST, 2),
        Submitted(FIRST, GroupHandle(FIRST, "backend", "group-1")),
        asked(SECOND, 1),
        Submitted(SECOND, GroupHandle(SECOND, "backend", "group-2")),
        NodeLost(FIRST, 0, None, "exit code 1"),
        NodeLost(FIRST, 1, None, "exit code 1", Blame.PREEMPTION),
    ]
    for event in events:
        ledger.append(event, after=ledger.catch_up())
    return ledger


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    backend = Backend()
    monkeypatch.setattr(machines, "open_provisioner", lambda *_: backend)
    return backend


def test_every_machine_has_the_name_that_the_story_gives_it(ledger: Ledger) -> None:
    assert list(machines_of(ledger.store).known) == ["t-1/0", "t-1/1", "t-2/0"]


@pytest.mark.parametrize("which", ["t-1/1", "1"])
def test_one_is_chosen_by_its_name_or_its_number(ledger: Ledger, which: str) -> None:
    assert list(printed(ledger.store, which, last=5)) == [
        "(t-1/1: attempt 1)",
        "(t-1/1) no module, says 1",
        "(t-1/1) that is all",
    ]


def test_of_all_of_them_each_is_told_and_who_said_nothing_too(ledger: Ledger) -> None:
    told = list(printed(ledger.store, ALL, last=1))
    assert [line for line in told if "that is all" in line] == [
        "(t-1/0) that is all",
        "(t-1/1) that is all",
    ]
    assert told[-1] == "(t-2/0: nothing is told of it, or not yet)"


@pytest.mark.parametrize("which", ["t-1/7", "9", "nobody"])
def test_a_machine_that_is_none_is_told_with_those_there_were(ledger: Ledger, which: str) -> None:
    with pytest.raises(ConfigError, match="has no machine") as wrong:
        list(printed(ledger.store, which, last=5))
    assert "t-1/0, t-1/1, t-2/0" in wrong.value.do


def test_last_words_are_of_those_who_never_spoke_in_the_bucket(ledger: Ledger) -> None:
    assert last_words(ledger).splitlines() == [
        "What they printed before they ended:",
        "(t-1/0: attempt 1)",
        "(t-1/0) no module, says 0",
        "(t-1/0) that is all",
    ]


def test_who_cannot_be_asked_keeps_neither_the_others_nor_an_error_from_being_told(
    ledger: Ledger, backend: Backend
) -> None:
    backend.silent = {0}
    told = list(printed(ledger.store, ALL, last=5))
    assert told[0] == "(t-1/0: cannot be told: nobody is at home)"
    assert "(t-1/1) that is all" in told
    assert last_words(ledger) == "", "the only one that never spoke"


def test_a_bucket_that_does_not_answer_keeps_no_error_from_being_told(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "offers", Mock(side_effect=TransientStoreError("no answer")))
    assert last_words(ledger) == ""


def test_each_is_asked_of_the_backend_that_its_own_fit_used(
    ledger: Ledger, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later fit has its own machines, and its failure its own reasons."""
    asked: list[str] = []

    def opened(name: str, _options: dict[str, Any]) -> Backend:
        asked.append(name)
        return backend

    monkeypatch.setattr(machines, "open_provisioner", opened)
    ledger.append(FitEnded("failed", "no"), after=ledger.catch_up())
    elsewhere = a_spec(fit_id="f2", provisioner="elsewhere")
    ledger.append(FitStarted(elsewhere), after=ledger.catch_up())
    assert last_words(ledger) == ""
    list(printed(ledger.store, ALL, last=5))
    assert asked == [a_spec().provisioner] * 3


def test_a_backend_that_keeps_nothing_says_so(ledger: Ledger, backend: Any) -> None:
    backend.traits.keeps_output = False
    told = list(printed(ledger.store, ALL, last=5))
    assert len(told) == 3
    assert all("keeps nothing" in line for line in told)
    assert "keeps nothing" in last_words(ledger)
