"""The `Provisioner` protocol that every backend implements, and the `Traits` that it declares.

State of a group, as a caller sees it (`NodeState` per node; backends map their own states to it):

    state     | event                                   | next
    ----------|-----------------------------------------|---------------------------
    (none)    | submit returns a GroupHandle            | WAITING
    (none)    | submit returns a Refusal                | (none); may be submitted again
    WAITING   | the machine starts                      | RUNNING
    WAITING   | the backend reports that it cannot come | REFUSED
    RUNNING   | preemption or exit with success         | GONE
    RUNNING   | the agent exits with an error           | FAILED
    any       | cancel                                  | GONE

Console output of machines, as stored by their backend.

Workers' output is in the bucket, and an agent's log is on its machine. If a machine fails before
its agent has joined the run (an image without spotfit, a missing library, a role that may not read
the bucket), only the backend's copy of the console output shows the reason.

A provisioner with `Traits.keeps_output` implements `MachineOutputReader`. It may be called at any
time, also for terminated machines.

Account checks of `spotfit doctor`: whether a backend could rent machines with its options.

A provisioner may implement `check_account(storage="")`, which yields one `AccountCheck` for each
prerequisite, also after a check has failed. `storage` is the URL of the bucket that the machines
have to reach, or ''.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from spotfit.core.errors import ProvisionPermissionError, SpotfitError
from spotfit.core.ids import Token
from spotfit.core.units import format_count
from spotfit.model.failure_model import MarketPrior
from spotfit.model.group import (
    UNKNOWN_SOFTWARE,
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    Software,
)
from spotfit.provision.launch import AgentLaunchSpec


@dataclass(frozen=True, slots=True)
class Traits:
    """Capabilities and timings of a backend. Policies read them instead of testing its type."""

    spot: bool = True
    """The backend may preempt machines."""
    max_nodes: int = 10_000
    """Largest number of machines in one group."""
    notice_s: float = 0.0
    """Time between a preemption notice and the end of the machine, in seconds."""
    mean_lifetime_s: float = MarketPrior().mean_lifetime_s
    """Prior of the mean time until a preemption. Has the weight of one preemption that the run
    observed itself."""
    start_time_s: float = 600.0
    """Prior of the time from a request for machines to the first training step: the boot of the
    machine, its image, and the start of workers."""
    requeues_itself: bool = False
    """The backend restarts the agent of a lost machine without a new `submit`."""
    releases_on_agent_exit: bool = True
    """A machine is no longer billed after its agent has exited."""
    observe_interval_s: float = 10.0
    """Minimum time between two useful calls of `observe`, in seconds."""
    status_lag_s: float = 60.0
    """How long the backend may still report RUNNING after a machine has terminated."""
    read_lag_s: float = 60.0
    """How long `observe` and `find_group` may not see a group after its submission, in seconds; 0
    if reads show every completed write. The leader then takes unknown machines for waiting ones."""
    notice_sources: tuple[str, ...] = ("signal",)
    """Names of the preemption notice sources that agents on its machines watch."""
    shared_directories: Literal["always", "possibly", "never"] = "possibly"
    """Whether its machines see directories of the computer that calls `fit()`: "always" on the same
    computer, "never" if no file system can be mounted. `fit()` rejects such a storage_path for
    "never", and the default storage_path for "possibly"."""
    keeps_output: bool = False
    """The backend implements `spotfit.provision.api.MachineOutputReader`."""
    software: Software = UNKNOWN_SOFTWARE
    """Python and package versions on its machines, as far as known in advance. `fit()` raises if a
    function pickled by the caller could not be loaded there."""

    @property
    def is_nearby(self) -> bool:
        """Whether its machines are on this computer: runs may use short intervals."""
        # Only backends without a cloud API, such as `local`, declare an interval below one second.
        return self.observe_interval_s < 1.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The backend has no capacity or quota at present. An expected outcome, hence not an error."""

    reason: str
    is_final: bool = False
    """The same request will be refused later as well."""


class Provisioner(Protocol):
    """A backend that rents groups of machines.

    `plan` is pure. `submit`, `observe` and `cancel` block on the backend's API, are idempotent, and
    may be called from any process. The entry point names the class, which has
    `with_options(**options)` as constructor. It may have a tuple `network_options`: the names of
    options that must be equal for machines of two objects of it to connect to each other.
    """

    @property
    def name(self) -> str:
        """The name of the entry point, such as "aws_batch", as in `provisioner="aws_batch"`."""

    @property
    def traits(self) -> Traits:
        """Capabilities and timings of the backend, which policies read."""

    def plan(self, request: GroupRequest) -> GroupPlan:
        """Translate a request into the backend's API fields, without network or clock.

        Returns the same plan for the same request. Rents exactly `request.offer`, if it is set and
        the backend lists offers (`spotfit.provision.offers`). Otherwise places all machines in
        `request.network`, if it is set and the backend has several. Raises `ConfigError` if the
        request cannot be satisfied with the backend's options, for instance if it needs too many
        machines.
        """

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        """Request the machines of `plan` under its token, and return before they run.

        A second call with the same token returns the first group. A `Refusal` means that there is
        no capacity or quota at present. `launch` holds the environment of every agent; its secrets
        may be sent only in the backend's launch request, and must not be written anywhere else.
        Raises `ProvisionError` for permanent failures, such as `QuotaError` or
        `ProvisionPermissionError`; after other exceptions the caller repeats the request with its
        token.
        """

    def observe(self, handle: GroupHandle) -> GroupStatus:
        """Return the present state of every node of the group, in the order of node indices.

        The nodes of an unknown group are GONE and not `is_known`. May be out of date by
        `Traits.status_lag_s`.
        """

    def cancel(self, handle: GroupHandle) -> None:
        """Request termination of all machines of the group without waiting for it.

        No error for a group that is unknown or has ended. Also terminates a group that reads do not
        show yet.
        """


def open_client(provisioner: Provisioner) -> None:
    """Load the client library of the backend and its settings on this machine; rents nothing.

    Called before a run is started. Optional: only backends with a client library implement
    `open_client()`; for others nothing is done. Raises `MissingExtraError` if the library is not
    installed, `ConfigError` if a setting is missing, such as the region, and `ProvisionError`.
    """
    # Not a part of the protocol, like `prewarm`.
    method = getattr(provisioner, "open_client", None)
    if method is not None:
        method()


def find_group(
    provisioner: Provisioner, plan: GroupPlan, launch: AgentLaunchSpec
) -> GroupHandle | None:
    """Return the group that was submitted under the token of `plan`; None if there is none.

    For a request whose outcome is unknown, and whose machines are to be released. A backend that
    can look up a token implements `find_group(plan, launch)`, which starts nothing. For others the
    request is repeated, which may start machines: the caller then cancels them. None also if that
    is refused, and for `Traits.read_lag_s` after the submission: the caller asks again. Blocks on
    the backend's API, and raises what `submit` raises.
    """
    # Not a part of the protocol, so that it has four calls only (decision 0006).
    method = getattr(provisioner, "find_group", None)
    if method is not None:
        return cast("GroupHandle | None", method(plan, launch))
    answer = provisioner.submit(plan, launch)
    return answer if isinstance(answer, GroupHandle) else None


def prewarm(
    provisioner: Provisioner, plan: GroupPlan, framework: str, preload: Sequence[str] = ()
) -> AbstractContextManager[object]:
    """Return a context in which machines for `plan` may already import `framework`.

    `framework` is the name of its entry point, such as "torch", and `preload` has further modules
    to import, as in `RunSpec.preload`. Optional: a backend implements
    `prewarm(plan, framework, preload)` only if a machine is free of charge before it is submitted;
    for others the context does nothing. `submit` uses prewarmed machines; leaving the context ends
    the others.
    """
    # Not a part of the protocol, so that backends without it need no empty method (decision 0033).
    method = getattr(provisioner, "prewarm", None)
    return nullcontext() if method is None else method(plan, framework, preload)


# --- Console output of machines, as stored by their backend ---------------------------------------


@dataclass(frozen=True, slots=True)
class MachineOutput:
    """The last lines of one attempt; a backend may start a machine several times."""

    source: str
    """Where the complete output is stored, in the backend's terms."""
    lines: tuple[str, ...] = ()


class MachineOutputReader(Protocol):
    """The additional method of a provisioner with `Traits.keeps_output`."""

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> Sequence[MachineOutput]:
        """Return the last `max_lines` lines of every attempt of machine `node`, oldest first.

        `node` is the index in the group, from 0. Output that the backend does not have yet, or has
        deleted, is missing. Raises the exceptions of the backend's client library.
        """


def fetch_machine_output(
    provisioner: Provisioner, handle: GroupHandle, node: int, *, max_lines: int = 200
) -> Sequence[MachineOutput]:
    """Return the last `max_lines` lines of each attempt of machine `node` of the group.

    `node` is the index in the group, from 0. Oldest attempt first; empty if the backend keeps no
    output, does not have it yet, or has deleted it. Raises the exceptions of the backend's client
    library.
    """
    if not provisioner.traits.keeps_output:
        return ()
    return cast("MachineOutputReader", provisioner).fetch_machine_output(
        handle, node, max_lines=max_lines
    )


def last_lines(text: str, max_lines: int) -> tuple[str, ...]:
    """Return the last `max_lines` lines of `text`, without line ends; none for 0.

    For provisioners whose API returns the complete output of a machine.
    """
    # A slice that starts at -0 would return all lines.
    return tuple(text.splitlines()[-max_lines:]) if max_lines > 0 else ()


# --- Account checks of spotfit doctor -------------------------------------------------------------


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
    """Raised by a check of `spotfit doctor` that cannot be carried out. `run_check` catches it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def skip_if_denied() -> Iterator[None]:
    """Within the context, turn a denied query into a skipped check, for use with `run_check`.

    `ProvisionPermissionError` becomes `CheckSkippedError`: a missing permission to inspect a
    prerequisite does not prove that the prerequisite is missing.
    """
    try:
        yield
    except ProvisionPermissionError as denied:
        raise CheckSkippedError(denied.message) from denied


def run_check(name: str, check: Callable[[], Any], *, do: str = "") -> AccountCheck:
    """Run `check` and return the result for `spotfit doctor`; never raises an exception of `check`.

    `name` describes the prerequisite. The return value of `check` becomes the detail, and an
    exception makes it fail; `do` is the remedy unless the exception has its own.
    `CheckSkippedError` makes the result inconclusive, which counts as passed.
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
    """Yield the checks of `spotfit doctor` for a backend: a plan for one worker, then its own.

    `storage` is the URL of the bucket that the machines have to reach, or ''. The backend's checks
    query its API; they are omitted if the plan is invalid or the backend has none. Nothing is
    rented.
    """

    def describe_plan() -> str:
        plan = provisioner.plan(request)
        machines = format_count(plan.num_nodes, "machine")
        return f"{machines} with {format_count(plan.slots_per_node, 'worker')}"

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
