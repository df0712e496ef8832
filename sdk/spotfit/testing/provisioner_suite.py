"""Conformance tests of the `Provisioner` protocol, for built-in and third-party backends.

class TestMyCloud(ProvisionerSuite):
    @pytest.fixture
    def provisioner(self) -> Provisioner:
        return MyProvisioner(...)    # of a cloud without groups of this test

    @pytest.fixture
    def cloud(self) -> Cloud | None:
        return MySimulator(...)      # optional: injects faults
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec
import pytest

from spotfit.core.errors import ConfigError, ProvisionError, ProvisionPermissionError, QuotaError
from spotfit.core.ids import Token
from spotfit.host import system
from spotfit.host.system import SystemClock
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, GroupStatus, NodeState
from spotfit.model.offer import Offer
from spotfit.provision.api import Provisioner, Refusal, find_group
from spotfit.provision.launch import AgentLaunchSpec
from spotfit.provision.offers import OfferListing, list_offers

SECRET = "dGhlIHNlY3JldCBvZiB0aGlzIHJ1bjogMzIgYnl0ZXM="  # noqa: S105  # tests search for it in serialised values
_POLL_INTERVAL_S = 0.05


class FaultInjectingCloud(Protocol):
    """Test access to a simulated cloud, which the fixture `cloud` of `ProvisionerSuite` returns."""

    def inject_fault(self, kind: str, times: int) -> None:
        """Let the next `times` API requests fail; 0 ends earlier faults of this kind.

        `kind` is 'quota', 'permission', 'capacity', 'credentials' or 'unavailable'. An
        implementation calls `pytest.skip` for kinds that it cannot cause.
        """

    def reclaim_newest(self) -> None:
        """Preempt the newest running machine at once, without a preemption notice."""


class ProvisionerSuite:
    """Base class of tests of a `Provisioner`. A subclass provides the fixture `provisioner`.

    Tests that need faults are skipped unless it overrides the fixture `cloud`.
    """

    timeout_s: ClassVar[float] = 60.0
    """Maximum time for the start or termination of machines."""

    # ── fixtures ─────────────────────────────────────────────────────────────────────────────────

    @pytest.fixture
    def remembers_released_groups(self) -> bool:
        """Whether the cloud refuses to start a released group again for the same token.

        Override it to return False if not: then the agents of the new machines find in the journal
        that the group was released, and exit; one test is skipped.
        """
        return True

    @pytest.fixture
    def cloud(self) -> FaultInjectingCloud | None:
        """The simulated cloud that injects faults; with None, tests with faults are skipped."""
        return None

    @pytest.fixture
    def launch(self, tmp_path: Path) -> AgentLaunchSpec:
        """Launch spec of a run without a journal in `tmp_path`: its agents wait 30 s for one."""
        return AgentLaunchSpec(str(tmp_path / "run"), system.new_run_id(), SECRET)

    @pytest.fixture
    def request_for(self) -> Callable[[int], GroupRequest]:
        """Function that returns a request for a number of workers, each with a new token."""

        def make(workers: int) -> GroupRequest:
            token = Token(f"t-{uuid.uuid4().hex[:12]}")
            return GroupRequest(
                token=token, num_workers=workers, total_workers=workers, run_name="suite"
            )

        return make

    @pytest.fixture
    def plan(
        self, provisioner: Provisioner, request_for: Callable[[int], GroupRequest]
    ) -> GroupPlan:
        """A plan for one worker, with a token that no other test uses."""
        return provisioner.plan(request_for(1))

    @pytest.fixture
    def handle(
        self, provisioner: Provisioner, launch: AgentLaunchSpec, plan: GroupPlan
    ) -> Iterator[GroupHandle]:
        """The granted group of `plan`; its machines are released after the test."""
        granted = _assert_granted(provisioner.submit(plan, launch))
        yield granted
        self._release(provisioner, granted)

    # ── plan ─────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("workers", [1, 2, 3, 8])
    def test_a_plan_has_a_slot_for_every_worker_and_can_be_serialised(
        self, provisioner: Provisioner, request_for: Callable[[int], GroupRequest], workers: int
    ) -> None:
        """`plan` is deterministic, keeps the token, and its result survives JSON."""
        request = request_for(workers)
        plan = provisioner.plan(request)
        assert plan == provisioner.plan(request), "plans must be deterministic"
        assert plan.token == request.token
        assert plan.num_nodes * plan.slots_per_node >= workers
        assert plan.num_nodes >= 1
        assert _json_round_trip(plan, GroupPlan) == plan

    def test_a_replacement_has_machines_of_the_same_size(
        self, provisioner: Provisioner, request_for: Callable[[int], GroupRequest]
    ) -> None:
        """`total_workers` determines the size of the machines, `num_workers` only their number."""
        group = provisioner.plan(request_for(8))
        # `total_workers` stays: it determines the size of the machines, `num_workers` their number.
        replacement = provisioner.plan(msgspec.structs.replace(request_for(8), num_workers=1))
        assert replacement.slots_per_node == group.slots_per_node
        assert replacement.num_nodes == 1

    def test_a_plan_of_more_than_max_nodes_is_refused(
        self, provisioner: Provisioner, request_for: Callable[[int], GroupRequest]
    ) -> None:
        """`plan` raises `ConfigError` for more machines than `Traits.max_nodes`."""
        too_many = (provisioner.traits.max_nodes + 1) * provisioner.plan(
            request_for(1)
        ).slots_per_node
        request = msgspec.structs.replace(request_for(1), num_workers=too_many)
        with pytest.raises(ConfigError):
            provisioner.plan(request)

    # ── offers ───────────────────────────────────────────────────────────────────────────────────

    def test_listed_offers_can_be_planned_and_no_others(
        self, provisioner: Provisioner, request_for: Callable[[int], GroupRequest]
    ) -> None:
        """`plan` rents the offer of the request, or raises `ConfigError` with a remedy.

        An offer may be listed for its price although the options do not allow to rent it.
        """
        offers = _require_offers(provisioner, request_for(1)).offers
        # Bills and later decisions refer to offers by name.
        names = [offer.name for offer in offers]
        assert len(set(names)) == len(names)
        assert names == [offer.name for offer in list_offers(provisioner, request_for(1)).offers]
        requests = [msgspec.structs.replace(request_for(1), offer=offer) for offer in offers]
        plans = [_plan_or_remedy(provisioner, request) for request in requests]
        assert any(plans), "no listed offer can be rented"
        of_other = msgspec.structs.replace(offers[0], name="none-such", provisioner="none-such")
        with pytest.raises(ConfigError):
            provisioner.plan(msgspec.structs.replace(request_for(1), offer=of_other))

    # ── submit, observe, cancel ──────────────────────────────────────────────────────────────────

    def test_machines_start_and_are_released(
        self,
        provisioner: Provisioner,
        launch: AgentLaunchSpec,
        request_for: Callable[[int], GroupRequest],
    ) -> None:
        """All machines run after `submit` and are terminated after `cancel`, also if repeated.

        They are those of the last listed offer, if the backend lists offers.
        """
        offer = _last_rentable_offer(provisioner, request_for)
        plan = provisioner.plan(msgspec.structs.replace(request_for(2), offer=offer))
        handle = _assert_granted(provisioner.submit(plan, launch))
        if offer is not None:
            assert handle.offer == offer.name
        assert len(provisioner.observe(handle).nodes) == plan.num_nodes
        started = self._wait_until(provisioner, handle, _all_running)
        provisioner.cancel(handle)
        ended = self._wait_until(provisioner, handle, lambda status: status.is_terminated)
        _assert_times_in_order(started, ended)
        provisioner.cancel(handle)  # idempotent: a new leader may repeat it

    def test_submit_is_idempotent(
        self,
        provisioner: Provisioner,
        launch: AgentLaunchSpec,
        plan: GroupPlan,
        handle: GroupHandle,
        request_for: Callable[[int], GroupRequest],
    ) -> None:
        """A second `submit` of a plan returns the same handle and requests no further machines."""
        _assert_default_offer(provisioner, handle, request_for(1))
        assert _assert_granted(provisioner.submit(plan, launch)) == handle
        self._wait_until(provisioner, handle, _all_running)
        # Also after the start: a new leader repeats a submit whose outcome was not recorded.
        assert _assert_granted(provisioner.submit(plan, launch)) == handle
        assert len(provisioner.observe(handle).nodes) == plan.num_nodes

    def test_a_token_is_looked_up_without_starting_machines(
        self,
        provisioner: Provisioner,
        launch: AgentLaunchSpec,
        plan: GroupPlan,
        request_for: Callable[[int], GroupRequest],
    ) -> None:
        """`find_group`, if implemented, returns the submitted group, and None for another token."""
        if not hasattr(provisioner, "find_group"):
            pytest.skip("this backend cannot look up a token")
        assert find_group(provisioner, plan, launch) is None
        handle = _assert_granted(provisioner.submit(plan, launch))
        assert find_group(provisioner, plan, launch) == handle
        assert find_group(provisioner, provisioner.plan(request_for(1)), launch) is None
        self._release(provisioner, handle)

    def test_a_released_group_is_not_started_again(
        self,
        provisioner: Provisioner,
        launch: AgentLaunchSpec,
        plan: GroupPlan,
        remembers_released_groups: bool,  # noqa: FBT001  # a fixture
    ) -> None:
        """`submit` with a released token is refused or returns the terminated group."""
        if not remembers_released_groups:
            pytest.skip("this cloud does not remember released groups")
        handle = _assert_granted(provisioner.submit(plan, launch))
        self._release(provisioner, handle)
        again = provisioner.submit(plan, launch)
        # The cloud may refuse, or return the handle of the terminated group.
        if not isinstance(again, Refusal):
            assert provisioner.observe(again).is_terminated

    def test_a_serialised_handle_identifies_its_group(
        self, provisioner: Provisioner, handle: GroupHandle
    ) -> None:
        """A handle that was written to and read from JSON can be observed and cancelled."""
        # The journal stores the handle as JSON; another agent reads it.
        read = _json_round_trip(handle, GroupHandle)
        assert read == handle
        self._wait_until(provisioner, read, _all_running)
        self._release(provisioner, read)

    def test_an_unknown_group_is_terminated(
        self, provisioner: Provisioner, handle: GroupHandle
    ) -> None:
        """`observe` reports a group that never existed as terminated; `cancel` raises no error."""
        self._release(provisioner, handle)
        unknown = self._unknown_handle(handle)
        assert provisioner.observe(unknown).is_terminated
        provisioner.cancel(unknown)

    def test_the_secret_of_the_run_is_never_serialised(
        self, provisioner: Provisioner, plan: GroupPlan, handle: GroupHandle
    ) -> None:
        """The run's secret is in none of the plan, the handle and the status."""
        for value in (plan, handle, provisioner.observe(handle)):
            assert SECRET.encode() not in msgspec.json.encode(value)

    # ── a cloud that misbehaves ──────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize(
        ("kind", "error"),
        [
            ("quota", QuotaError),
            ("permission", ProvisionPermissionError),
            ("credentials", ProvisionPermissionError),
        ],
    )
    def test_a_permanent_failure_raises_an_error_with_a_remedy(
        self,
        provisioner: Provisioner,
        launch: AgentLaunchSpec,
        plan: GroupPlan,
        cloud: FaultInjectingCloud | None,
        kind: str,
        error: type[ProvisionError],
    ) -> None:
        """`submit` raises `error` for a fault of `kind`, without the run's secret in the text."""
        # More faults than the client libraries retry.
        _require_cloud(cloud).inject_fault(kind, 100)
        with pytest.raises(error) as raised:
            provisioner.submit(plan, launch)
        assert SECRET not in str(raised.value)
        _require_cloud(cloud).inject_fault(kind, 0)

    def test_missing_capacity_is_a_temporary_refusal(
        self,
        provisioner: Provisioner,
        launch: AgentLaunchSpec,
        plan: GroupPlan,
        cloud: FaultInjectingCloud | None,
    ) -> None:
        """Without capacity, `submit` or the status refuses with a reason; later it succeeds."""
        _require_cloud(cloud).inject_fault("capacity", 1_000_000)
        answer = provisioner.submit(plan, launch)
        if isinstance(answer, Refusal):
            assert not answer.is_final
            assert answer.reason
        else:  # the cloud queues requests and reports the reason
            self._wait_until(provisioner, answer, lambda status: bool(status.refusal))
        _require_cloud(cloud).inject_fault("capacity", 0)
        handle = _assert_granted(provisioner.submit(plan, launch))
        self._wait_until(provisioner, handle, _all_running)
        self._release(provisioner, handle)

    def test_a_temporary_service_failure_is_neither_grant_nor_refusal(
        self,
        provisioner: Provisioner,
        launch: AgentLaunchSpec,
        plan: GroupPlan,
        cloud: FaultInjectingCloud | None,
    ) -> None:
        """`submit` raises an error other than `ProvisionError`; repeated later it succeeds."""
        _require_cloud(cloud).inject_fault("unavailable", 1_000_000)
        with pytest.raises(Exception) as raised:  # noqa: PT011  # each client library has its own
            provisioner.submit(plan, launch)
        assert not isinstance(raised.value, ProvisionError)
        _require_cloud(cloud).inject_fault("unavailable", 0)
        self._release(provisioner, _assert_granted(provisioner.submit(plan, launch)))

    def test_a_preempted_machine_is_reported_with_a_reason(
        self,
        provisioner: Provisioner,
        launch: AgentLaunchSpec,
        plan: GroupPlan,
        cloud: FaultInjectingCloud | None,
    ) -> None:
        """A preempted machine is terminated, with a reason, or requeued by the backend."""
        simulator = _require_cloud(cloud)
        handle = _assert_granted(provisioner.submit(plan, launch))
        self._wait_until(provisioner, handle, _all_running)
        simulator.reclaim_newest()
        status = self._wait_until(
            provisioner, handle, lambda status: status.nodes[0].state != NodeState.RUNNING
        )
        if provisioner.traits.requeues_itself:
            self._wait_until(provisioner, handle, _all_running)
        else:
            assert status.nodes[0].is_terminated
            assert status.nodes[0].reason
        self._release(provisioner, handle)

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────

    def _wait_until(
        self,
        provisioner: Provisioner,
        handle: GroupHandle,
        condition: Callable[[GroupStatus], bool],
    ) -> GroupStatus:
        """Poll until `condition` is true and return that status."""
        clock = SystemClock()
        deadline = clock.now() + self.timeout_s
        while not condition(status := provisioner.observe(handle)):
            assert clock.now() < deadline, f"timed out; last status: {status}"
            clock.wait(_POLL_INTERVAL_S)
        return status

    def _release(self, provisioner: Provisioner, handle: GroupHandle) -> None:
        provisioner.cancel(handle)
        self._wait_until(provisioner, handle, lambda status: status.is_terminated)

    def _unknown_handle(self, handle: GroupHandle) -> GroupHandle:
        """Return a handle of a group that never existed. Override it if names have a format."""
        return msgspec.structs.replace(handle, token=Token("t-0123456789ab"), name="t-0123456789ab")


def _require_offers(provisioner: Provisioner, request: GroupRequest) -> OfferListing:
    if not hasattr(provisioner, "offers"):
        pytest.skip("this backend lists no offers")
    return list_offers(provisioner, request)


def _plan_or_remedy(provisioner: Provisioner, request: GroupRequest) -> GroupPlan | None:
    """Return the plan; None if the options do not allow to rent the offer of the request."""
    assert request.offer is not None
    try:
        plan = provisioner.plan(request)
    except ConfigError as error:
        # An offer that can be rented raises none.
        assert error.do, f"the error for {request.offer.name} has no remedy"  # noqa: PT017
        return None
    assert plan == provisioner.plan(request), "plans must be deterministic"
    # The present price is not part of what is rented.
    unpriced = msgspec.structs.replace(request.offer, price=None)
    assert plan == provisioner.plan(msgspec.structs.replace(request, offer=unpriced))
    assert _json_round_trip(plan, GroupPlan) == plan
    return plan


def _last_rentable_offer(
    provisioner: Provisioner, request_for: Callable[[int], GroupRequest]
) -> Offer | None:
    """Return the last offer that the options allow to rent: on-demand, if there are both markets.

    None if the backend lists no offers.
    """
    if not hasattr(provisioner, "offers"):
        return None
    for offer in reversed(list_offers(provisioner, request_for(1)).offers):
        with contextlib.suppress(ConfigError):
            provisioner.plan(msgspec.structs.replace(request_for(1), offer=offer))
            return offer
    return None


def _assert_default_offer(
    provisioner: Provisioner, handle: GroupHandle, request: GroupRequest
) -> None:
    """Check the offer of a group that was requested without one."""
    if not hasattr(provisioner, "offers"):
        return
    listing = list_offers(provisioner, request)
    # '' if the provider chooses among several offers.
    assert handle.offer in {"", *(offer.name for offer in listing.offers)}
    if listing.default:
        assert handle.offer == listing.default


def _assert_times_in_order(started: GroupStatus, ended: GroupStatus) -> None:
    """Check the billing times of machines, as far as the backend reports them."""
    for before, after in zip(started.nodes, ended.nodes, strict=True):
        assert before.ended_at_ms is None, "the machine was running"
        if after.started_at_ms is not None and before.started_at_ms is not None:
            assert after.started_at_ms == before.started_at_ms
        if after.ended_at_ms is not None:
            assert after.started_at_ms is not None
            assert after.started_at_ms <= after.ended_at_ms


def _all_running(status: GroupStatus) -> bool:
    return all(node.state == NodeState.RUNNING for node in status.nodes)


def _assert_granted(answer: GroupHandle | Refusal) -> GroupHandle:
    assert isinstance(answer, GroupHandle), f"refused: {answer.reason}"
    return answer


def _require_cloud(cloud: FaultInjectingCloud | None) -> FaultInjectingCloud:
    if cloud is None:
        pytest.skip("this cloud cannot inject faults")
    return cloud


def _json_round_trip(value: Any, expected_type: type[Any]) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value), type=expected_type)
