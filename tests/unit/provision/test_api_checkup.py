"""Every prerequisite of a backend is checked, and a failed check has a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ProvisionPermissionError
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.api import (
    AccountCheck,
    CheckSkippedError,
    run_account_checks,
    run_check,
    skip_if_denied,
)


class Backend:
    """A backend with one failing prerequisite, and optionally without a valid plan."""

    def __init__(self, *, planned: bool = True, workers: int = 4) -> None:
        self.planned, self.workers = planned, workers

    def plan(self, request: GroupRequest) -> GroupPlan:
        if not self.planned:
            raise ConfigError("queue not given", do="Give one.")
        return GroupPlan(
            token=request.token,
            provisioner="backend",
            num_nodes=1,
            slots_per_node=self.workers,
        )

    def check_account(self, storage: str = "") -> Iterator[AccountCheck]:
        yield run_check("the caller's identity", lambda: f"user with {storage or 'no bucket'}")
        yield run_check("a queue", lambda: 1 / 0, do="Make one.")


def run_checks(backend: Any) -> list[AccountCheck]:
    return list(run_account_checks(backend))


def test_one_worker_is_described_in_the_singular() -> None:
    assert run_checks(Backend(workers=1))[0].detail == "1 machine with 1 worker"


def test_a_failed_check_does_not_stop_the_following_ones() -> None:
    assert run_checks(Backend()) == [
        AccountCheck("the options are valid for one worker", True, "1 machine with 4 workers"),
        AccountCheck("the caller's identity", True, "user with no bucket"),
        AccountCheck("a queue", False, "ZeroDivisionError: division by zero", "Make one."),
    ]


def test_without_a_valid_plan_the_backend_is_not_checked() -> None:
    (check,) = run_checks(Backend(planned=False))
    assert check == AccountCheck(
        "the options are valid for one worker", False, "queue not given", "Give one."
    )


def test_the_remedy_of_an_error_becomes_the_remedy_of_the_check() -> None:
    def deny() -> None:
        raise ProvisionPermissionError("not allowed", do="Ask your administrator.")

    assert run_check("a permission", deny).do == "Ask your administrator."


def test_the_storage_url_is_passed_to_the_backend() -> None:
    _, identity, _ = run_account_checks(Backend(), "s3://bucket/runs")  # type: ignore[arg-type]
    assert identity.detail == "user with s3://bucket/runs"


def test_a_skipped_check_is_inconclusive_and_not_failed() -> None:
    def skipped() -> None:
        raise CheckSkippedError("querying is denied")

    check = run_check("a permission", skipped, do="Ask.")
    assert check == AccountCheck(
        "a permission", True, "querying is denied", "Ask.", conclusive=False
    )


def test_a_denied_query_is_a_skipped_check() -> None:
    """The remedy is the one of the check: permission to query would not fix the prerequisite."""

    def query() -> str:
        with skip_if_denied():
            raise ProvisionPermissionError("querying is denied", do="Ask your administrator.")

    check = run_check("a permission", query, do="Check it manually.")
    assert check == AccountCheck(
        "a permission", True, "querying is denied", "Check it manually.", conclusive=False
    )


def test_the_denied_query_is_the_cause() -> None:
    refused = ProvisionPermissionError("querying is denied")
    with pytest.raises(CheckSkippedError, match="querying is denied") as raised, skip_if_denied():
        raise refused
    assert raised.value.__cause__ is refused


def test_only_a_denied_permission_skips_a_check() -> None:
    def query() -> str:
        with skip_if_denied():
            raise ConfigError("no such queue", do="Make one.")

    assert run_check("a queue", query) == AccountCheck(
        "a queue", False, "no such queue", "Make one."
    )


def test_a_permitted_query_passes_the_check_with_its_result() -> None:
    def query() -> str:
        with skip_if_denied():
            return "a permission"

    assert run_check("a permission", query) == AccountCheck("a permission", True, "a permission")
