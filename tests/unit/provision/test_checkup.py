"""What a backend needs is looked at one by one, and what is wrong says how to mend it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.checkup import Finding, UnseenError, examine, look, unseen_if_refused


class Backend:
    """One whose account may lack something."""

    def __init__(self, *, planned: bool = True) -> None:
        self.planned = planned

    def plan(self, request: GroupRequest) -> GroupPlan:
        if not self.planned:
            raise ConfigError("queue not given", do="Give one.")
        return GroupPlan(request.token, "backend", 1, 4)

    def examine(self, storage: str = "") -> Iterator[Finding]:
        yield look("who we are", lambda: f"somebody with {storage or 'no bucket'}")
        yield look("a queue", lambda: 1 / 0, do="Make one.")


def findings(backend: Any) -> list[Finding]:
    return list(examine(backend))


def test_everything_is_looked_at_whatever_is_wrong_before() -> None:
    assert findings(Backend()) == [
        Finding("its options make a plan", True, "1 machine, 4 workers on each"),
        Finding("who we are", True, "somebody with no bucket"),
        Finding("a queue", False, "ZeroDivisionError: division by zero", "Make one."),
    ]


def test_without_a_plan_nothing_else_is_asked() -> None:
    (finding,) = findings(Backend(planned=False))
    assert finding == Finding("its options make a plan", False, "queue not given", "Give one.")


def test_our_own_errors_bring_their_remedy() -> None:
    def refuse() -> None:
        raise ProvisionPermissionError("not allowed", do="Ask your administrator.")

    assert look("a right", refuse).do == "Ask your administrator."


def test_a_backend_hears_of_the_bucket_its_machines_would_have_to_reach() -> None:
    _, who, _ = examine(Backend(), "s3://bucket/runs")  # type: ignore[arg-type]
    assert who.found == "somebody with s3://bucket/runs"


def test_what_cannot_be_looked_at_is_told_and_not_held_to_be_wrong() -> None:
    def unseen() -> None:
        raise UnseenError("nobody may ask")

    finding = look("a right", unseen, do="Ask.")
    assert finding == Finding("a right", True, "nobody may ask", "Ask.", seen=False)


def test_who_may_not_ask_has_not_looked() -> None:
    """The remedy is the check's: what would let us ask mends nothing of what was to be seen."""

    def ask() -> str:
        with unseen_if_refused():
            raise ProvisionPermissionError("nobody may ask", do="Ask your administrator.")

    finding = look("a right", ask, do="Look yourself.")
    assert finding == Finding("a right", True, "nobody may ask", "Look yourself.", seen=False)


def test_the_refusal_is_kept_as_the_cause() -> None:
    refused = ProvisionPermissionError("nobody may ask")
    with pytest.raises(UnseenError, match="nobody may ask") as told, unseen_if_refused():
        raise refused
    assert told.value.__cause__ is refused


def test_only_a_refusal_makes_a_check_unseen() -> None:
    def ask() -> str:
        with unseen_if_refused():
            raise ConfigError("no such queue", do="Make one.")

    assert look("a queue", ask) == Finding("a queue", False, "no such queue", "Make one.")


def test_a_check_that_may_ask_gives_what_it_finds() -> None:
    def ask() -> str:
        with unseen_if_refused():
            return "a right"

    assert look("a right", ask) == Finding("a right", True, "a right")
