"""What a backend needs is looked at one by one, and what is wrong says how to mend it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.checkup import Finding, examine, look


class Backend:
    """One whose account may lack something."""

    def __init__(self, *, planned: bool = True) -> None:
        self.planned = planned

    def plan(self, request: GroupRequest) -> GroupPlan:
        if not self.planned:
            raise ConfigError("queue not given", do="Give one.")
        return GroupPlan(request.token, "backend", 1, 4)

    def examine(self) -> Iterator[Finding]:
        yield look("who we are", lambda: "somebody")
        yield look("a queue", lambda: 1 / 0, do="Make one.")


def findings(backend: Any) -> list[Finding]:
    return list(examine(backend))


def test_everything_is_looked_at_whatever_is_wrong_before() -> None:
    assert findings(Backend()) == [
        Finding("its options make a plan", True, "1 machine, 4 workers on each"),
        Finding("who we are", True, "somebody"),
        Finding("a queue", False, "ZeroDivisionError: division by zero", "Make one."),
    ]


def test_without_a_plan_nothing_else_is_asked() -> None:
    (finding,) = findings(Backend(planned=False))
    assert finding == Finding("its options make a plan", False, "queue not given", "Give one.")


def test_our_own_errors_bring_their_remedy() -> None:
    def refuse() -> None:
        raise ProvisionPermissionError("not allowed", do="Ask your administrator.")

    assert look("a right", refuse).do == "Ask your administrator."
