"""Account checks of `spotfit doctor`: whether a backend could rent machines with its options.

A provisioner may implement `check_account(storage="")`, which yields one `AccountCheck` for each
prerequisite, also after a check has failed. `storage` is the URL of the bucket that the machines
have to reach, or ''.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from spotfit.core.errors import ProvisionPermissionError, SpotfitError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.provision.api import Provisioner


@dataclass(frozen=True, slots=True)
class AccountCheck:
    """The result of checking one prerequisite."""

    name: str
    passed: bool
    detail: str = ""
    """What was found, or the error message."""
    do: str = ""
    """The remedy; '' if there is none."""
    conclusive: bool = True
    """False if the check could not be carried out; it then counts as passed."""


class CheckSkippedError(Exception):
    """Raised by a check that cannot be carried out. `run_check` catches it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def skip_if_denied() -> Iterator[None]:
    """Turn a denied query into a skipped check.

    A missing permission to inspect a prerequisite does not prove that the prerequisite is missing.
    """
    try:
        yield
    except ProvisionPermissionError as denied:
        raise CheckSkippedError(denied.message) from denied


def run_check(name: str, check: Callable[[], Any], *, do: str = "") -> AccountCheck:
    """Run `check`; its return value becomes the detail, and an exception makes it fail.

    `CheckSkippedError` makes the result inconclusive.
    """
    try:
        detail = check()
    except CheckSkippedError as skipped:
        return AccountCheck(name, passed=True, detail=skipped.reason, do=do, conclusive=False)
    except SpotfitError as error:
        return AccountCheck(name, passed=False, detail=error.message, do=error.do or do)
    except Exception as error:  # noqa: BLE001  # each client library has its own errors
        return AccountCheck(name, passed=False, detail=f"{type(error).__name__}: {error}", do=do)
    return AccountCheck(name, passed=True, detail="" if detail is None else str(detail))


def run_account_checks(provisioner: Provisioner, storage: str = "") -> Iterator[AccountCheck]:
    """Check that one worker can be planned, then run the backend's own checks."""

    def describe_plan() -> str:
        plan = provisioner.plan(request)
        return f"{plan.num_nodes} machine with {plan.slots_per_node} workers"

    request = GroupRequest(
        token=Token("t-checkup"), num_workers=1, total_workers=1, run_name="checkup"
    )
    # `plan` is pure: it finds invalid options without credentials and without cost.
    planned = run_check("the options are valid for one worker", describe_plan)
    yield planned
    check_account: Callable[[str], Iterator[AccountCheck]] | None = getattr(
        provisioner, "check_account", None
    )
    # Without a valid plan the backend's checks would only repeat the same configuration error.
    if planned.passed and check_account is not None:
        yield from check_account(storage)
