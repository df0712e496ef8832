"""The reconciler: plan, submit and record; idempotent retries; observation of groups."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.control.background_calls import SynchronousCalls
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.reconciler import Reconciler
from spotfit.core.errors import (
    ConfigError,
    MissingExtraError,
    ProvisionPermissionError,
    QuotaError,
    SpotfitError,
)
from spotfit.core.ids import RunId, Token
from spotfit.ledger.journal import Ledger
from spotfit.model.events import (
    FailureCause,
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupsReleased,
    GroupSubmitted,
    JournalEvent,
    LeaderElected,
    MachinesObserved,
    MachineTimes,
    NodeLost,
    RoundClosed,
    RoundOpened,
    ValidationRequest,
)
from spotfit.model.group import (
    GroupHandle,
    GroupPlan,
    GroupRequest,
    GroupStatus,
    NodeState,
    NodeStatus,
    Unreachable,
)
from spotfit.model.leader_state import LeaderState, NoRound
from spotfit.model.offer import Market, Offer
from spotfit.model.spec import CostSpec, FeederSpec, RunTiming, ValidationSpec
from spotfit.policy.actions import Wait
from spotfit.policy.time_budget import BACKEND_TIME_LIMIT_MARGIN_S
from spotfit.provision.api import MachineOutput, Refusal, Traits
from spotfit.provision.launch import AgentExitCode, AgentLaunchSpec
from spotfit.provision.offers import OfferListing
from spotfit.store.api import Store
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import (
    RUN_ID,
    TOKEN,
    a_committed_checkpoint,
    a_leader_state,
    a_member,
    a_member_status,
    a_request,
    a_round,
    a_spec,
    a_training,
    an_agent_crash,
    an_agent_id,
    member_statuses,
)
from tests.unit.control.fake_provisioner import (
    LAUNCH,
    DeferredCalls,
    FakeProvisioner,
    token_factory,
)

NO_MEMBERS = LeaderState(agent_id=an_agent_id(0))


class LeaderHarness:
    """A reconciler with its ledger, a fake provisioner, and the appended events in order."""

    def __init__(
        self,
        *,
        calls: Any = None,
        store: Store | None = None,
        cloud: FakeProvisioner | None = None,
        run_id: RunId = RUN_ID,
        **spec: Any,
    ) -> None:
        self.cloud = cloud or FakeProvisioner()
        self.events: list[JournalEvent] = []
        self.ledger = Ledger(store or MemoryStore(), run_id, an_agent_id(0))
        self.ledger.set_entry_listener(lambda _slot, _body, entry: self.events.append(entry.event))
        self.calls = calls or SynchronousCalls()
        if store is None:
            self.write(
                FitStarted(spec=a_spec(run_id=run_id, **spec)),
                LeaderElected(leader=an_agent_id(0), epoch=1, coordinator_address=None),
            )
        else:
            self.ledger.catch_up()
        self.writer = JournalWriter(self.ledger, SynchronousCalls())
        self.writer.advance(0.0)
        self.leader = Reconciler(self.writer, self.cloud, LAUNCH, self.calls, token_factory())

    def write(self, *events: JournalEvent) -> None:
        for event in events:
            self.ledger.append(event, after=self.ledger.journal_view)

    def steps(self, now: float = 0.0, observations: LeaderState = NO_MEMBERS) -> Wait:
        """Reconcile until the result is a wait."""
        again, wait = True, Wait(0, "")
        while again:
            again, wait = self.leader.reconcile(self.with_observations(observations), now)
        return wait

    def with_observations(self, observations: LeaderState) -> LeaderState:
        return replace(
            observations,
            group_statuses=self.leader.group_statuses,
            granted_at=self.leader.granted_at,
            refused_at=self.leader.refused_at,
        )

    @property
    def event_names(self) -> list[str]:
        return [type(event).__name__ for event in self.events[2:]]


def test_a_request_is_planned_submitted_and_recorded() -> None:
    harness = LeaderHarness()
    harness.steps()
    assert harness.event_names == ["GroupPlanned", "GroupSubmitted"]
    assert (harness.cloud.submitted_tokens, harness.cloud.launches) == ([TOKEN], [LAUNCH])
    group = harness.ledger.view.groups[TOKEN]
    assert (group.plan.num_nodes, group.plan.body) == (2, {"run": LAUNCH.run_url})
    assert LAUNCH.secret.encode() not in b"".join(
        harness.ledger.store.get(found.key) for found in harness.ledger.store.list()
    )


def test_a_request_names_the_network_of_the_run_and_those_without_a_machine() -> None:
    harness = LeaderHarness()
    plan = harness.cloud.plan(a_request(TOKEN, 1))
    for token, network in (("t-east", "east"), ("t-west", "west")):
        request = a_request(Token(token), 1)
        handle = GroupHandle(token=Token(token), provisioner="local", name="g", network=network)
        harness.write(
            GroupPlanned(request=request, plan=replace(plan, token=Token(token))),
            GroupSubmitted(token=Token(token), handle=handle),
        )
    refused = NodeLost(
        token=Token("t-east"), node=0, agent=None, reason="none", cause=FailureCause.PREEMPTION
    )
    harness.write(refused)
    harness.writer.request_read()
    harness.writer.advance(0.0)
    harness.steps(100.0)
    planned = [event for event in harness.events if isinstance(event, GroupPlanned)][-1]
    assert (planned.request.network, planned.request.refused_networks) == ("west", ("east",))


def test_the_backend_gets_the_rest_of_the_time_budget_with_a_margin() -> None:
    harness = LeaderHarness(time_budget_s=3600.0)
    harness.steps(100.5)
    (planned,) = [event for event in harness.events if isinstance(event, GroupPlanned)]
    assert planned.request.time_limit_s == math.ceil(3499.5 + BACKEND_TIME_LIMIT_MARGIN_S)


def test_without_a_time_budget_the_backend_gets_no_limit() -> None:
    harness = LeaderHarness()
    harness.steps(100.5)
    (planned,) = [event for event in harness.events if isinstance(event, GroupPlanned)]
    assert planned.request.time_limit_s is None


def test_a_request_names_its_run_for_the_tags_of_what_is_rented() -> None:
    harness = LeaderHarness()
    harness.steps()
    spec = harness.ledger.view.spec
    (planned,) = [event for event in harness.events if isinstance(event, GroupPlanned)]
    assert (planned.request.run_name, planned.request.run_id) == (spec.name, spec.run_id)


def test_a_validation_machine_has_its_own_role() -> None:
    harness = LeaderHarness(validation=ValidationSpec(resources={"GPU": 1.0}))
    machine_request = a_request(Token("t-w"))
    harness.write(
        GroupPlanned(request=machine_request, plan=harness.cloud.plan(machine_request)),
        GroupSubmitted(
            token=machine_request.token,
            handle=GroupHandle(token=machine_request.token, provisioner="local", name="g"),
        ),
        a_committed_checkpoint("c1", validation=ValidationRequest()),
    )
    harness.cloud.submit_results = [Refusal("full")]
    harness.steps(7.0, a_leader_state(members={}))
    (request,) = [one.request for one in harness.events[5:] if isinstance(one, GroupPlanned)]
    assert (request.role, request.num_workers, request.total_workers) == ("validate", 1, 1)
    assert request.resources_per_worker == {"GPU": 1.0}
    assert harness.leader.refused_at == {"validate": 7.0}


def test_a_machine_for_feeders_has_its_own_role_and_resources() -> None:
    feeders = FeederSpec(min_nodes=1, max_nodes=1, resources={"CPU": 16.0})
    harness = LeaderHarness(feeders=feeders)
    machine_request = a_request(Token("t-w"))
    members = [a_member(n, token=Token("t-w")) for n in range(2)]
    harness.write(
        GroupPlanned(request=machine_request, plan=harness.cloud.plan(machine_request)),
        GroupSubmitted(
            token=machine_request.token,
            handle=GroupHandle(token=machine_request.token, provisioner="local", name="g"),
        ),
        RoundOpened(round=a_round(members=members)),
    )
    harness.cloud.submit_results = [Refusal("full")]
    connected = member_statuses(*(a_member_status(member=one, running_round=1) for one in members))
    harness.steps(7.0, a_leader_state(members=connected, phase=a_training()))
    [request] = [one.request for one in harness.events[5:] if isinstance(one, GroupPlanned)]
    assert (request.role, request.num_workers, request.total_workers) == ("feed", 1, 1)
    assert request.resources_per_worker == {"CPU": 16.0}
    assert harness.leader.refused_at == {"feed": 7.0}


def test_a_machine_for_feeders_that_has_not_worked_delays_the_next_request() -> None:
    harness = LeaderHarness(feeders=FeederSpec(min_nodes=1, max_nodes=1, resources={"CPU": 16.0}))
    request = replace(a_request(TOKEN, 1), role="feed")
    handle = GroupHandle(token=TOKEN, provisioner="local", name="g")
    harness.write(
        GroupPlanned(request=request, plan=harness.cloud.plan(request)),
        GroupSubmitted(token=TOKEN, handle=handle),
    )
    harness.writer.advance(0.0)
    killed = NodeStatus(state=NodeState.FAILED, reason="OOMKilled", out_of_memory=True)
    harness.leader.group_statuses = {TOKEN: GroupStatus(nodes=(killed,))}
    agent = an_agent_id(5)
    joined = a_leader_state(
        members={}, last_agent_by_node={(TOKEN, 0): agent}, disconnected_since={agent: 6.0}
    )
    harness.leader.reconcile(harness.with_observations(joined), 7.0)
    [lost] = [event for event in harness.events if isinstance(event, NodeLost)]
    assert (lost.agent, lost.is_unusable) == (agent, True)
    assert harness.leader.refused_at == {"feed": 7.0}


@pytest.mark.parametrize("has_offers", [True, False])
def test_offers_of_feeders_are_listed_if_they_have_some_of_their_own(*, has_offers: bool) -> None:
    offer = Offer(name="cpu#feeders", provisioner="local", market=Market.SPOT)
    feeders = FeederSpec(resources={"CPU": 16.0}, offers=(offer,) if has_offers else ())
    requests: list[GroupRequest] = []

    class ListingCloud(FakeProvisioner):
        def offers(self, request: GroupRequest) -> OfferListing:
            requests.append(request)
            return OfferListing(offers=())

    harness = LeaderHarness(
        cloud=ListingCloud(), feeders=feeders, cost=CostSpec(machines={"spot": 2})
    )
    harness.leader.observe(0.0, every_s=1.0)
    expected = [("train", 2), ("feed", 1)] if has_offers else [("train", 2)]
    assert [(one.role, one.num_workers) for one in requests] == expected
    assert not has_offers or requests[1].resources_per_worker == {"CPU": 16.0}


def test_a_planned_group_is_submitted_by_a_successor_with_the_same_token() -> None:
    first = LeaderHarness(calls=DeferredCalls())  # they never end
    first.steps()
    assert first.event_names == ["GroupPlanned"]
    second = LeaderHarness(store=first.ledger.store)
    second.steps()
    assert second.event_names == ["GroupPlanned", "GroupSubmitted"]
    assert second.cloud.submitted_tokens == [TOKEN]


def test_a_refusal_is_recorded_and_the_next_request_has_a_new_token() -> None:
    harness = LeaderHarness()
    harness.cloud.submit_results = [Refusal("no capacity")]
    wait = harness.steps(now=100.0)
    assert harness.event_names == ["GroupPlanned", "GroupRefused"]
    assert wait.until == 101.0, "after one refusal it waits a second"
    harness.steps(now=101.0)
    assert harness.event_names[2:] == ["GroupPlanned", "GroupSubmitted"]
    assert harness.cloud.submitted_tokens == [TOKEN, Token("t-2")]


@pytest.mark.parametrize(
    "answer", [Refusal("not your region", is_final=True), QuotaError("0 of 0")]
)
def test_a_final_refusal_ends_the_run(answer: Any) -> None:
    harness = LeaderHarness()
    harness.cloud.submit_results = [answer]
    harness.steps()
    assert harness.event_names == ["GroupPlanned", "GroupRefused", "FitEnded"]
    ended = harness.ledger.view.fit_end
    assert ended is not None
    assert ended.outcome == "failed"
    assert ended.reason in ("not your region", "0 of 0")


MISSING = MissingExtraError("boto3 is not installed", do="pip install 'spotfit[aws]'")


@pytest.mark.parametrize("error", [MISSING, ConfigError("No AWS region is configured.")])
def test_a_request_that_cannot_be_sent_ends_the_run_at_once(error: SpotfitError) -> None:
    harness = LeaderHarness()
    harness.cloud.submit_results = [error] * 9
    harness.steps()
    assert harness.event_names == ["GroupPlanned", "GroupRefused", "FitEnded"]
    assert len(harness.cloud.submitted_tokens) == 1
    ended = harness.ledger.view.fit_end
    assert ended is not None
    assert ended.reason == str(error), "with the remedy"


def test_a_request_that_may_have_been_granted_is_repeated_despite_a_missing_library() -> None:
    harness = LeaderHarness()
    harness.cloud.submit_results = [ConnectionError("reset"), MISSING]
    harness.steps(harness.steps(now=0.0).until)
    assert harness.event_names == ["GroupPlanned"]
    assert len(harness.cloud.submitted_tokens) == 2


def test_a_request_of_another_leader_is_repeated_despite_a_missing_library() -> None:
    first = LeaderHarness(calls=DeferredCalls())
    first.steps()
    second = LeaderHarness(store=first.ledger.store)
    second.cloud.submit_results = [MISSING]
    second.steps()
    assert second.event_names == ["GroupPlanned"]


DENIED = ProvisionPermissionError("AWS authentication failed: UnrecognizedClientException")


def harness_after_a_round() -> LeaderHarness:
    """A leader whose two machines trained in a round that has ended, and are lost."""
    harness = LeaderHarness()
    harness.steps()
    harness.write(
        RoundOpened(round=a_round()),
        RoundClosed(round_number=1, cause=FailureCause.PREEMPTION, reason="lost 2 machines"),
        *(
            NodeLost(token=TOKEN, node=n, agent=an_agent_id(n), reason="reclaimed")
            for n in range(2)
        ),
        GroupsReleased(token=TOKEN),
    )
    harness.writer.request_read()
    harness.writer.advance(0.0)
    harness.events.clear()
    return harness


@pytest.mark.parametrize("error", [DENIED, QuotaError("0 of 0"), ConfigError("No AWS region.")])
def test_rejected_replacements_are_requested_again_until_the_backend_accepts(
    error: SpotfitError,
) -> None:
    harness, now = harness_after_a_round(), 0.0
    harness.cloud.submit_results = [error] * 8
    shown: set[str | None] = set()
    while not isinstance(harness.events and harness.events[-1], GroupSubmitted):
        now = max(now + 0.1, harness.steps(now).until)
        shown.add(harness.ledger.view.last_refusal)
        assert harness.ledger.view.fit_end is None
    assert str(error) in shown, "the user sees why it waits"
    assert (harness.ledger.view.permanent_refusals, harness.ledger.view.last_refusal) == (0, None)


def test_rejected_replacements_end_the_run_after_ten_minutes() -> None:
    harness, now = harness_after_a_round(), 0.0
    harness.cloud.submit_results = [DENIED] * 99
    until = 0.0
    while (ended := harness.ledger.view.fit_end) is None:
        now = max(now + 0.1, until)
        until = harness.steps(now).until
    assert 600.0 <= now <= 700.0
    assert ended.reason == str(DENIED)


def test_a_rejected_request_that_may_have_been_granted_is_repeated_with_its_token() -> None:
    """A group that is recorded as refused is never released."""
    harness, now = harness_after_a_round(), 0.0
    harness.cloud.submit_results = [ConnectionError("reset"), *[DENIED] * 5]
    while harness.cloud.submit_results:
        now = max(now + 0.1, harness.steps(now).until)
    harness.steps(max(now, harness.steps(now).until))
    assert [type(event) for event in harness.events] == [GroupPlanned, GroupSubmitted]
    assert set(harness.cloud.submitted_tokens[1:]) == {Token("t-2")}


def test_a_submit_with_unknown_outcome_is_repeated_with_the_same_token() -> None:
    harness = LeaderHarness()
    harness.cloud.submit_results = [ConnectionError("reset"), ConnectionError("reset")]
    wait = harness.steps(now=0.0)
    assert harness.event_names == ["GroupPlanned"], "the outcome is unknown"
    assert wait.until == pytest.approx(0.2)
    harness.steps(now=0.1)
    assert harness.cloud.submitted_tokens == [TOKEN], "no second submit during the delay"
    wait = harness.steps(now=0.2)
    assert wait.until == pytest.approx(0.6), "exponential backoff"
    harness.steps(now=wait.until)
    assert harness.event_names == ["GroupPlanned", "GroupSubmitted"]
    assert harness.cloud.submitted_tokens == [TOKEN] * 3


def test_repeated_submit_failures_back_off_with_one_token() -> None:
    """Abandoning the request could leave granted machines running."""
    harness = LeaderHarness()
    harness.cloud.submit_results = [ConnectionError("reset")] * 99
    now = 0.0
    while now < 300:
        now = max(now + 0.1, harness.steps(now).until)
    assert harness.event_names == ["GroupPlanned"]
    assert set(harness.cloud.submitted_tokens) == {TOKEN}
    assert 10 < len(harness.cloud.submitted_tokens) < 25


def test_a_slow_submit_is_called_once_and_its_result_recorded() -> None:
    slow = DeferredCalls()
    harness = LeaderHarness(calls=slow)
    for now in (0.0, 0.1, 0.2):
        wait = harness.steps(now)
        assert wait.reason == "requesting 2 machines"
    assert harness.event_names == ["GroupPlanned"]
    slow.complete()
    harness.steps(0.3)
    assert harness.event_names == ["GroupPlanned", "GroupSubmitted"]
    assert harness.cloud.submitted_tokens == [TOKEN]


def test_a_released_group_is_recorded() -> None:
    harness = LeaderHarness()
    harness.steps()
    harness.write(FitEnded(outcome="finished"))
    headless = LeaderState(agent_id=an_agent_id(0), is_headless=True)
    harness.steps(observations=headless)
    assert harness.event_names[-1] == "GroupsReleased"
    assert harness.cloud.cancelled_tokens == [TOKEN]
    assert harness.leader.is_idle


def test_a_failed_release_is_retried() -> None:
    harness = LeaderHarness()
    harness.steps()
    harness.write(FitEnded(outcome="finished"))
    harness.cloud.call_error = ConnectionError("reset")
    headless = LeaderState(agent_id=an_agent_id(0), is_headless=True)
    wait = harness.steps(now=5.0, observations=headless)
    assert (wait.until, harness.leader.is_idle) == (7.0, False)
    assert wait.reason == "releasing t-1 failed: ConnectionError: reset"
    harness.cloud.call_error = None
    harness.steps(now=7.0, observations=headless)
    assert harness.ledger.view.groups[TOKEN].is_released


# --- observation ---------------------------------------------------------------------------------


def two_groups(calls: Any) -> LeaderHarness:
    """A reconciler with two granted groups."""
    harness = LeaderHarness(calls=calls)
    for n in (1, 2):
        request = a_request(Token(f"t-{n}"), 1)
        plan = harness.cloud.plan(request)
        handle = harness.cloud.submit(plan, LAUNCH)
        assert isinstance(handle, GroupHandle)
        harness.write(
            GroupPlanned(request=request, plan=plan),
            GroupSubmitted(token=request.token, handle=handle),
        )
    return harness


def test_groups_are_observed_at_the_given_interval() -> None:
    harness = two_groups(SynchronousCalls())
    for now in (0.0, 1.0, 9.9, 10.0):
        harness.leader.observe(now, every_s=10.0)
    assert harness.cloud.observed_tokens == [Token("t-1"), Token("t-2")] * 2
    assert harness.leader.group_statuses[TOKEN].nodes[0].state is NodeState.RUNNING


def test_observe_soon_skips_the_interval() -> None:
    harness = two_groups(SynchronousCalls())
    harness.leader.observe(0.0, every_s=10.0)
    harness.cloud.reclaim_node(TOKEN, 0)
    harness.leader.observe_soon()
    harness.leader.observe(0.1, every_s=10.0)
    assert harness.leader.group_statuses[TOKEN].nodes[0].reason == "reclaimed"


def test_slow_observations_of_several_groups_do_not_overlap() -> None:
    slow = DeferredCalls()
    harness = two_groups(slow)
    harness.leader.observe(0.0, every_s=10.0)
    slow.complete("observe t-1")
    harness.leader.observe(0.1, every_s=10.0)
    slow.complete("observe t-2")
    for now in (0.2, 0.3, 5.0):
        harness.leader.observe(now, every_s=10.0)
    assert harness.cloud.observed_tokens == [Token("t-1"), Token("t-2")], "each once"
    assert harness.leader.group_statuses.keys() == {Token("t-1"), Token("t-2")}


def test_status_as_of_accounts_for_the_status_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = DeferredCalls()
    harness = two_groups(slow)
    monkeypatch.setattr(harness.cloud, "traits", Traits(status_lag_s=3.0))
    harness.leader.observe(10.0, every_s=10.0)
    slow.complete()
    harness.leader.observe_soon()  # what is under way was asked before
    harness.leader.observe(12.0, every_s=10.0)
    assert harness.leader.status_as_of == {Token("t-1"): 7.0, Token("t-2"): 7.0}
    harness.leader.observe(12.5, every_s=10.0)
    slow.complete()
    harness.leader.observe(13.0, every_s=10.0)
    assert harness.leader.status_as_of == {Token("t-1"): 9.5, Token("t-2"): 9.5}


def test_a_group_that_reads_do_not_show_yet_is_waiting() -> None:
    harness = LeaderHarness()
    harness.cloud.traits = Traits(read_lag_s=60.0)
    harness.steps(100.0)
    machines = harness.cloud.groups.pop(TOKEN)
    for now in (101.0, 159.0):
        harness.leader.observe(now, every_s=1.0)
        states = [node.state for node in harness.leader.group_statuses[TOKEN].nodes]
        assert states == [NodeState.WAITING] * len(states)
        assert not harness.leader.all_groups_terminated
    harness.cloud.groups[TOKEN] = machines
    harness.leader.observe(159.5, every_s=0.1)
    assert harness.leader.group_statuses[TOKEN].nodes == tuple(machines)
    del harness.cloud.groups[TOKEN]
    harness.leader.observe(159.8, every_s=0.1)
    # The fake reports one unknown machine.
    nodes = harness.leader.group_statuses[TOKEN].nodes
    assert nodes == (machines[0],), "another server answered"
    harness.leader.observe(160.0, every_s=0.1)
    assert harness.leader.all_groups_terminated


def test_a_new_leader_waits_for_the_lag_of_reads_from_its_first_observation() -> None:
    first = LeaderHarness()
    first.steps()
    second = LeaderHarness(store=first.ledger.store)
    second.cloud.traits = Traits(read_lag_s=60.0)
    second.leader.observe(500.0, every_s=1.0)
    assert not second.leader.all_groups_terminated
    second.leader.observe(560.0, every_s=1.0)
    assert second.leader.all_groups_terminated


def test_a_failed_observation_changes_nothing() -> None:
    harness = two_groups(SynchronousCalls())
    harness.leader.observe(0.0, every_s=10.0)
    before = harness.leader.group_statuses
    harness.cloud.call_error = ConnectionError("reset")
    harness.leader.observe(10.0, every_s=10.0)
    assert harness.leader.group_statuses is before


def test_the_reason_of_a_waiting_group_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harness = two_groups(SynchronousCalls())
    waits = (NodeStatus(state=NodeState.WAITING),)
    for now, why in enumerate(["", "no capacity", "no capacity", "", "a quota", "a quota"]):
        status = GroupStatus(nodes=waits, refusal=why)
        monkeypatch.setattr(harness.cloud, "observe", lambda _, message=status: message)
        harness.leader.observe(10.0 * now, every_s=5.0)
    message = [line for line in capsys.readouterr().err.splitlines() if "group.waiting" in line]
    assert [("no capacity" in line, "a quota" in line) for line in message] == (
        [(True, False)] * 2 + [(False, True)] * 2
    ), "of each of two groups"


def test_released_groups_are_observed_until_their_end_is_recorded() -> None:
    harness = two_groups(SynchronousCalls())
    unbilled = MachineTimes(node=0, is_unbilled=True)
    harness.write(
        GroupsReleased(token=TOKEN),
        GroupsReleased(token=Token("t-2"), times={Token("t-2"): (unbilled,)}),
    )
    harness.leader.observe(0.0, every_s=10.0)
    assert harness.cloud.observed_tokens == [TOKEN]
    harness.write(MachinesObserved(times={TOKEN: (unbilled,)}))
    harness.leader.observe(10.0, every_s=10.0)
    assert harness.cloud.observed_tokens == [TOKEN]


def test_all_groups_are_terminated_only_if_the_backend_reports_each() -> None:
    harness = two_groups(SynchronousCalls())
    seen = [harness.leader.all_groups_terminated]
    for token in (Token("t-1"), Token("t-2")):
        harness.cloud.reclaim_node(token, 0)
        harness.leader.observe_soon()
        harness.leader.observe(0.0, every_s=10.0)
        seen.append(harness.leader.all_groups_terminated)
    request = a_request(Token("t-3"), 1)
    harness.write(GroupPlanned(request=request, plan=harness.cloud.plan(request)))
    seen.append(harness.leader.all_groups_terminated)
    assert seen == [False, False, True, False], "unobserved, one running, none running, one pending"


def test_granted_at_is_the_first_observation_of_each_running_machine() -> None:
    harness = two_groups(SynchronousCalls())
    for now in (5.0, 50.0):
        harness.leader.observe(now, every_s=10.0)
    assert harness.leader.granted_at == {(Token("t-1"), 0): 5.0, (Token("t-2"), 0): 5.0}
    # The backend restarts the first one.
    for now, node_state in ((60.0, NodeState.WAITING), (70.0, NodeState.RUNNING)):
        harness.cloud.groups[Token("t-1")][0] = NodeStatus(state=node_state)
        harness.leader.observe(now, every_s=10.0)
    assert harness.leader.granted_at == {(Token("t-1"), 0): 70.0, (Token("t-2"), 0): 5.0}


def test_a_machine_that_its_backend_restarts_was_reported_as_running() -> None:
    harness = two_groups(SynchronousCalls())
    harness.cloud.groups[Token("t-1")][0] = NodeStatus(state=NodeState.WAITING)
    harness.leader.observe(5.0, every_s=10.0)
    assert harness.leader.reported_running == {(Token("t-2"), 0)}
    harness.cloud.groups[Token("t-2")][0] = NodeStatus(state=NodeState.WAITING)
    harness.leader.observe(50.0, every_s=10.0)
    assert harness.leader.reported_running == {(Token("t-2"), 0)}


def test_an_event_that_lost_its_slot_is_decided_again() -> None:
    harness = LeaderHarness()
    other = harness.ledger.clone()
    other.append(
        LeaderElected(leader=an_agent_id(1), epoch=2, coordinator_address="h:1"),
        after=other.catch_up(),
    )
    again, _ = harness.leader.reconcile(a_leader_state(members={}), 0.0)
    assert again
    assert harness.event_names == ["LeaderElected"], "a deposed leader appends no plan"
    assert harness.cloud.submitted_tokens == []


def harness_with_failed_machine(calls: Any = None) -> LeaderHarness:
    """A leader whose only group has a machine that ended with an error."""
    harness = LeaderHarness(calls=calls, min_workers=1)
    plan = harness.cloud.plan(a_request(TOKEN, 1))
    handle = GroupHandle(token=TOKEN, provisioner="local", name="g")
    harness.write(
        GroupPlanned(request=a_request(TOKEN, 1), plan=plan),
        GroupSubmitted(token=TOKEN, handle=handle),
    )
    harness.writer.advance(0.0)
    failed = NodeStatus(state=NodeState.FAILED, reason="exit code 70")
    harness.leader.group_statuses = {TOKEN: GroupStatus(nodes=(failed,))}
    return harness


def reconcile(harness: LeaderHarness) -> tuple[bool, Wait]:
    return harness.leader.reconcile(harness.with_observations(NO_MEMBERS), 0.0)


def test_a_loss_is_recorded_with_the_crash_that_its_agent_has_stored() -> None:
    harness = harness_with_failed_machine()
    harness.ledger.publish_crash(an_agent_crash(0))
    reconcile(harness)
    (lost,) = [event for event in harness.events if isinstance(event, NodeLost)]
    assert lost.crash == an_agent_crash(0)
    assert lost.reason == "its agent crashed: ValueError: no"


def test_a_loss_without_a_stored_crash_has_the_reason_of_the_backend() -> None:
    harness = harness_with_failed_machine()
    reconcile(harness)
    (lost,) = [event for event in harness.events if isinstance(event, NodeLost)]
    assert (lost.crash, lost.reason) == (None, "exit code 70")


@pytest.mark.parametrize(
    ("exit_code", "what"),
    [
        (AgentExitCode.STORAGE_UNREACHABLE, Unreachable.STORAGE),
        (AgentExitCode.STORAGE_REFUSED, Unreachable.ACCESS),
        (AgentExitCode.RUN_NOT_FOUND, Unreachable.RUN),
        (AgentExitCode.LEADER_UNREACHABLE, Unreachable.LEADER),
        (AgentExitCode.NODE_UNUSABLE, None),
        (None, None),
    ],
)
def test_exit_code_shows_what_a_machine_could_not_reach(
    exit_code: int | None, what: Unreachable | None
) -> None:
    harness = harness_with_failed_machine()
    failed = NodeStatus(state=NodeState.FAILED, reason="exited", exit_code=exit_code)
    harness.leader.group_statuses = {TOKEN: GroupStatus(nodes=(failed,))}
    harness.leader.reported_running = frozenset({(TOKEN, 0)})
    reconcile(harness)
    (lost,) = [event for event in harness.events if isinstance(event, NodeLost)]
    assert lost.unreachable is what
    assert [one.unreachable for one in harness.writer.view.unreachable_machines] == (
        [what] if what else []
    )


def test_a_storage_outage_that_the_leader_has_met_is_not_a_fault_of_the_machine() -> None:
    harness = harness_with_failed_machine()
    code = AgentExitCode.STORAGE_UNREACHABLE
    failed = NodeStatus(state=NodeState.FAILED, reason="exited", exit_code=code)
    harness.leader.group_statuses = {TOKEN: GroupStatus(nodes=(failed,))}
    harness.leader.reported_running = frozenset({(TOKEN, 0)})
    harness.writer.last_failure_at = -60.0
    reconcile(harness)
    (lost,) = [event for event in harness.events if isinstance(event, NodeLost)]
    assert lost.unreachable is None


def test_a_storage_outage_before_the_leader_observed_the_machine_is_not_its_fault() -> None:
    harness = harness_with_failed_machine()
    code = AgentExitCode.STORAGE_UNREACHABLE
    failed = NodeStatus(state=NodeState.FAILED, reason="exited", exit_code=code)
    harness.leader.group_statuses = {TOKEN: GroupStatus(nodes=(failed,))}
    reconcile(harness)
    (lost,) = [event for event in harness.events if isinstance(event, NodeLost)]
    assert lost.unreachable is None


def test_a_loss_is_recorded_after_the_crash_was_looked_up() -> None:
    calls = DeferredCalls()
    harness = harness_with_failed_machine(calls)
    assert not reconcile(harness)[0]
    assert NodeLost not in map(type, harness.events)
    calls.complete()
    assert reconcile(harness)[0]
    assert NodeLost in map(type, harness.events)


def end_with_pending_group(*failures: BaseException, harness: LeaderHarness) -> None:
    """End the fit after these failed requests."""
    harness.cloud.submit_results = list(failures)
    for number in range(len(failures)):
        harness.steps(100.0 * number)
    assert harness.cloud.submitted_tokens == [TOKEN] * len(failures)
    harness.write(FitEnded(outcome="cancelled"))
    harness.writer.request_read()
    harness.writer.advance(100.0 * len(failures))


def ended_at(now: float) -> LeaderState:
    return replace(NO_MEMBERS, phase=NoRound(since=now))


def test_a_pending_group_is_looked_up_at_once_after_the_end() -> None:
    harness = LeaderHarness()
    end_with_pending_group(*[ConnectionError("no answer")] * 9, harness=harness)
    harness.steps(801.0, ended_at(800.0))
    assert harness.cloud.looked_up_tokens == [TOKEN], "the next request was due in 30 s"
    assert harness.event_names[-1] == "GroupRefused"


def test_pending_groups_of_an_earlier_leader_are_looked_up_in_the_same_time_after_the_end() -> None:
    """One after the other, each for the time in which reads may miss it, would take too long."""
    harness = LeaderHarness()
    harness.cloud.traits = Traits(read_lag_s=60.0)
    tokens = [Token("t-one"), Token("t-two")]
    for token in tokens:
        request = a_request(token, 1)
        harness.write(GroupPlanned(request=request, plan=harness.cloud.plan(request)))
    harness.write(FitEnded(outcome="finished"))
    harness.writer.request_read()
    harness.writer.advance(100.0)
    for second in range(70):
        harness.steps(100.0 + second, ended_at(100.0))
    assert not any(harness.ledger.view.groups[token].is_pending for token in tokens)
    assert set(harness.cloud.looked_up_tokens) == set(tokens)


def test_a_denied_look_up_after_the_end_is_repeated() -> None:
    harness = LeaderHarness()
    end_with_pending_group(ConnectionError("no answer"), harness=harness)
    harness.cloud.call_error = ProvisionPermissionError("denied", do="allow it")
    wait = harness.steps(101.0, ended_at(100.0))
    assert 101.0 < wait.until <= 106.0
    assert harness.ledger.view.groups[TOKEN].is_pending
    harness.cloud.call_error = None
    harness.steps(110.0, ended_at(100.0))
    assert harness.event_names[-1] == "GroupRefused"


def test_an_agent_leaves_with_a_warning_if_look_ups_are_denied(
    capsys: pytest.CaptureFixture[str],
) -> None:
    harness = LeaderHarness()
    end_with_pending_group(ConnectionError("no answer"), harness=harness)
    harness.cloud.call_error = ProvisionPermissionError("denied", do="allow it")
    harness.steps(101.0, ended_at(100.0))
    for _ in range(2):
        harness.steps(190.0, ended_at(100.0))
    assert harness.leader.is_idle
    assert harness.ledger.view.groups[TOKEN].is_pending
    assert capsys.readouterr().err.count(f"run.machines_left groups={TOKEN}") == 1


class OutputKeepingProvisioner(FakeProvisioner):
    """A backend that keeps the output of its machines."""

    def __init__(self, lines: tuple[str, ...] | Exception) -> None:
        super().__init__(keeps_output=True)
        self._lines = lines

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> list[MachineOutput]:
        if isinstance(self._lines, Exception):
            raise self._lines
        return [MachineOutput("first start", ("old",)), MachineOutput("last start", self._lines)]


def record_failed_start(cloud: FakeProvisioner) -> NodeLost:
    harness = harness_with_failed_machine()
    harness.leader = Reconciler(harness.writer, cloud, LAUNCH, harness.calls, token_factory())
    failed = NodeStatus(state=NodeState.FAILED, reason="exit code 127")
    harness.leader.group_statuses = {TOKEN: GroupStatus(nodes=(failed,))}
    reconcile(harness)
    (lost,) = [event for event in harness.events if isinstance(event, NodeLost)]
    return lost


def test_a_failed_start_is_recorded_with_the_output_of_the_machine() -> None:
    """Releasing the group may delete it."""
    lost = record_failed_start(OutputKeepingProvisioner(("No module named spotfit",)))
    assert lost.output == ("No module named spotfit",)


def test_the_output_of_a_machine_is_recorded_without_the_run_key() -> None:
    lost = record_failed_start(OutputKeepingProvisioner((f"SPOTFIT_RUN_SECRET={LAUNCH.secret}",)))
    assert lost.output == ("SPOTFIT_RUN_SECRET=***",)


@pytest.mark.parametrize(
    "cloud",
    [FakeProvisioner(), OutputKeepingProvisioner(ValueError("denied"))],
    ids=["none kept", "not readable"],
)
def test_a_failed_start_without_output_is_recorded(cloud: FakeProvisioner) -> None:
    assert record_failed_start(cloud).output == ()


class LateOutputProvisioner(OutputKeepingProvisioner):
    """A backend that receives the output of its machines after some reads."""

    def __init__(self, reads: int) -> None:
        super().__init__(("AuthorizationHeaderMalformed",))
        self.reads = reads

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> list[MachineOutput]:
        self.reads -= 1
        found = super().fetch_machine_output(handle, node, max_lines=max_lines)
        return found if self.reads < 0 else []


def losses_after(cloud: FakeProvisioner, *moments: float) -> list[NodeLost]:
    """Reconcile at these times, with a machine that the storage has refused."""
    harness = harness_with_failed_machine()
    harness.leader = Reconciler(harness.writer, cloud, LAUNCH, harness.calls, token_factory())
    code = AgentExitCode.STORAGE_REFUSED
    failed = NodeStatus(state=NodeState.FAILED, reason="exited", exit_code=code)
    harness.leader.group_statuses = {TOKEN: GroupStatus(nodes=(failed,))}
    for now in moments:
        harness.leader.reconcile(harness.with_observations(NO_MEMBERS), now)
    return [event for event in harness.events if isinstance(event, NodeLost)]


def test_output_that_a_log_service_receives_late_explains_an_unreachable_storage() -> None:
    assert losses_after(LateOutputProvisioner(reads=1), 100.0) == []
    (lost,) = losses_after(LateOutputProvisioner(reads=1), 100.0, 103.0)
    assert lost.output == ("AuthorizationHeaderMalformed",)


def test_output_that_never_arrives_is_not_awaited_for_long() -> None:
    assert losses_after(LateOutputProvisioner(reads=9), 100.0, 109.9) == []
    (lost,) = losses_after(LateOutputProvisioner(reads=9), 100.0, 110.0)
    assert (lost.output, lost.unreachable) == ((), Unreachable.ACCESS)


class SharedQuota:
    """Machines of several runs, granted to waiting groups in turn, as far as a quota allows."""

    def __init__(self, machines: int) -> None:
        self._machines = machines
        self._clouds: list[FakeProvisioner] = []

    def attach(self, cloud: FakeProvisioner) -> None:
        self._clouds.append(cloud)

    def grant(self) -> None:
        groups = [group for cloud in self._clouds for group in cloud.groups.values()]
        nodes = [node for group in groups for node in group]
        free = self._machines - sum(node.state is NodeState.RUNNING for node in nodes)
        for index in range(self._machines):
            for group in groups:
                if free > 0 and group[index].state is NodeState.WAITING:
                    group[index], free = NodeStatus(state=NodeState.RUNNING), free - 1


class WaitingProvisioner(FakeProvisioner):
    """Machines wait until `SharedQuota.grant` lets them run."""

    def submit(self, plan: GroupPlan, launch: AgentLaunchSpec) -> GroupHandle | Refusal:
        self.groups.setdefault(plan.token, [NodeStatus(state=NodeState.WAITING)] * plan.num_nodes)
        return super().submit(plan, launch)


@pytest.mark.parametrize("seed", range(8))
def test_two_runs_that_hold_parts_of_one_quota_do_not_deadlock(seed: int) -> None:
    """Each run needs all three machines of the quota; whichever gets them would train."""
    quota, now = SharedQuota(3), 0.0
    runs: list[LeaderHarness] = []
    for number in range(2):
        run_id = RunId(f"{seed:016x}{number:016x}")
        # No agents join here, which must not end the wait.
        timing = RunTiming(boot_timeout_s=1e9)
        cloud = WaitingProvisioner()
        harness = LeaderHarness(cloud=cloud, run_id=run_id, max_workers=3, timing=timing)
        quota.attach(harness.cloud)
        runs.append(harness)
    for harness in runs:
        harness.steps(now)
    while now < 4 * 3600.0:
        now += 10.0
        quota.grant()
        for harness in runs:
            harness.leader.observe(now, every_s=1.0)
            harness.steps(now, HEADLESS)
        if any(is_complete(harness) for harness in runs):
            return
    pytest.fail("neither run has got its machines within four hours")


def is_complete(harness: LeaderHarness) -> bool:
    groups = harness.cloud.groups.values()
    return any([node.state for node in group] == [NodeState.RUNNING] * 3 for group in groups)


HEADLESS = LeaderState(agent_id=an_agent_id(0), is_headless=True)
