"""The headless leader: first request, monitoring, takeover and release."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.control.background_calls import SynchronousCalls
from spotfit.control.headless_leader import HeadlessLeader, sweep
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.reconciler import Reconciler
from spotfit.control.settlement import GroupSettler
from spotfit.core.errors import (
    BucketNotFoundError,
    JournalError,
    StoreError,
    TransientStoreError,
)
from spotfit.core.ids import AgentId, Token
from spotfit.ledger import keys
from spotfit.ledger.journal import Ledger
from spotfit.model.events import (
    CancelRequested,
    FitEnded,
    FitStarted,
    GroupPlanned,
    JournalEvent,
    LeaderElected,
    RoundOpened,
)
from spotfit.model.spec import RunTiming
from spotfit.policy.election import CLEANUP_LEASE_TIMEOUT_S
from spotfit.provision.api import Traits
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import (
    RUN_ID,
    TOKEN,
    ManualClock,
    a_member,
    a_request,
    a_round,
    a_spec,
    an_agent_id,
)
from tests.unit.control.fake_provisioner import LAUNCH, FakeProvisioner, token_factory

TIMING = RunTiming(
    lease_interval_s=5.0, lease_timeout_s=20.0, journal_poll_interval_s=1.0, observe_interval_s=2.0
)
SPEC = a_spec(timing=TIMING)
AGENT_LEADS = LeaderElected(
    leader=an_agent_id(0), epoch=2, coordinator_address=a_member(0).coordinator_address
)


class RunHarness:
    """A run with a fake provisioner and headless leaders."""

    def __init__(self, **traits: Any) -> None:
        self.store = MemoryStore()
        self.cloud = FakeProvisioner(**traits)
        self.other_clouds: dict[str, FakeProvisioner] = {}
        self.clock = ManualClock(100.0)
        self.agent = Ledger(self.store, RUN_ID, an_agent_id(0))
        self.new_token = token_factory()

    def headless(self, name: str = "driver") -> HeadlessLeader:
        ledger = Ledger(self.store, RUN_ID, AgentId(name))
        writer = JournalWriter(ledger, SynchronousCalls())
        group_reconciler = Reconciler(
            writer, self.cloud, LAUNCH, SynchronousCalls(), self.new_token
        )
        settler = GroupSettler(writer, self.open_provisioner, LAUNCH, SynchronousCalls())
        return HeadlessLeader(writer, group_reconciler, settler, self.clock.now())

    def open_provisioner(self, name: str, _options: dict[str, Any]) -> FakeProvisioner:
        """Return `cloud`, or the cloud of that name in `other_clouds`."""
        return self.other_clouds.get(name, self.cloud)

    def write(self, *events: JournalEvent) -> None:
        """Append events as an agent of the run."""
        for event in events:
            self.agent.append(event, after=self.agent.catch_up())

    def run_leaders(self, *headless_leaders: HeadlessLeader, for_s: float = 60.0) -> None:
        """Tick all leaders until they are done or the time is over."""
        end = self.clock.now() + for_s
        while (now := self.clock.now()) < end:
            wakes = [wake for one in headless_leaders if (wake := one.tick(now)) is not None]
            if not wakes:
                return
            self.clock.wait(min(max(min(wakes) - now, 0.01), end - now))


def start_run() -> RunHarness:
    harness = RunHarness()
    harness.write(FitStarted(spec=SPEC))
    return harness


def test_the_first_tick_claims_leadership_and_requests_machines() -> None:
    harness = start_run()
    driver = harness.headless()
    driver.tick(harness.clock.now())
    assert driver.view.is_leader(AgentId("driver"))
    assert driver.view.leader is not None
    assert driver.view.leader.coordinator_address is None, "any agent may take over from it"
    assert harness.cloud.submitted_tokens == [TOKEN]


def test_a_run_whose_journal_was_deleted_is_not_continued() -> None:
    harness = start_run()
    harness.write(AGENT_LEADS)
    driver = harness.headless()
    driver.tick(harness.clock.now())
    for found in list(harness.store.list()):
        harness.store.delete(found.key)
    runs_until = harness.clock.now() + TIMING.orphan_timeout_s
    while harness.clock.now() < runs_until:
        harness.agent.renew_lease()
        harness.run_leaders(driver, for_s=TIMING.lease_interval_s)
    # The leader exits after that time. Nothing takes its place.
    with pytest.raises(JournalError, match="deleted or replaced"):
        harness.run_leaders(driver, for_s=100.0)
    assert harness.cloud.submitted_tokens == []
    assert [found.key for found in harness.store.list(keys.JOURNAL.rstrip("/"))] == []


def test_the_end_of_a_run_in_a_deleted_bucket_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = start_run()
    driver = harness.headless()
    driver.tick(100.0)

    def get(_key: str) -> bytes:
        raise BucketNotFoundError("The bucket does not exist.")

    monkeypatch.setattr(harness.store, "get", get)
    for now in (160.0, 161.0 + TIMING.orphan_timeout_s):
        with pytest.raises(StoreError):
            driver.tick(now)
    with pytest.raises(JournalError, match="deleted or replaced"):
        driver.tick(162.0 + TIMING.orphan_timeout_s)


def test_without_a_run_the_leader_only_polls() -> None:
    harness = RunHarness()
    driver = harness.headless()
    assert driver.tick(100.0) == 101.0
    assert list(harness.store.list()) == []


def test_the_leader_monitors_while_the_lease_is_renewed() -> None:
    harness = start_run()
    driver = harness.headless()
    driver.tick(100.0)
    harness.write(AGENT_LEADS)
    for _ in range(10):
        harness.agent.renew_lease()
        harness.run_leaders(driver, for_s=10.0)
    assert driver.view.is_leader(an_agent_id(0))
    assert harness.cloud.submitted_tokens == [TOKEN]


def test_the_leader_claims_leadership_when_the_lease_expires() -> None:
    harness = start_run()
    driver = harness.headless()
    driver.tick(100.0)
    harness.write(AGENT_LEADS, RoundOpened(round=a_round()))
    harness.agent.renew_lease()
    harness.run_leaders(driver, for_s=19.0)
    assert driver.view.is_leader(an_agent_id(0))
    harness.run_leaders(driver, for_s=3.0)
    assert driver.view.is_leader(AgentId("driver"))
    assert driver.view.epoch == 3


class Hanging(MemoryStore):
    """A store that fails every call while it hangs."""

    hangs = False

    def get(self, key: str) -> bytes:
        if self.hangs:
            raise TransientStoreError("no answer")
        return super().get(key)


def test_a_leader_is_not_deposed_while_the_bucket_hangs() -> None:
    """While the lease cannot be read, it cannot be renewed either."""
    harness = start_run()
    harness.store = store = Hanging()
    harness.agent = Ledger(store, RUN_ID, an_agent_id(0))
    harness.write(FitStarted(spec=SPEC))
    driver = harness.headless()
    driver.tick(100.0)
    harness.write(AGENT_LEADS, RoundOpened(round=a_round()))
    harness.agent.renew_lease()
    harness.run_leaders(driver, for_s=4.0)
    store.hangs = True
    for _ in range(60):
        harness.clock.wait(1.0)
        with pytest.raises(TransientStoreError):
            driver.tick(harness.clock.now())
    store.hangs = False
    harness.run_leaders(driver, for_s=10.0)
    harness.agent.renew_lease()
    harness.run_leaders(driver, for_s=15.0)
    assert driver.view.is_leader(an_agent_id(0))
    harness.run_leaders(driver, for_s=10.0)
    assert driver.view.is_leader(AgentId("driver")), "until the lease expires later"


def test_new_machines_are_requested_when_all_are_lost() -> None:
    harness = start_run()
    driver = harness.headless()
    driver.tick(100.0)
    harness.write(AGENT_LEADS, RoundOpened(round=a_round()))
    for node in (0, 1):
        harness.cloud.reclaim_node(TOKEN, node)
    harness.run_leaders(driver, for_s=4.0)
    view = driver.view
    assert view.round is None, "detected by the backend, not by the lease"
    assert view.lost_agents == {an_agent_id(0), an_agent_id(1)}
    assert harness.cloud.submitted_tokens == [TOKEN, Token("t-2")]
    assert view.groups[TOKEN].is_released, (
        "the lost group is released without waiting for the lease"
    )


def test_a_new_leader_is_not_judged_by_the_previous_leaders_lease() -> None:
    """Observed on a loaded machine: it cost the new leader's first round."""
    harness = start_run()
    driver = harness.headless()
    driver.tick(100.0)
    harness.write(AGENT_LEADS, RoundOpened(round=a_round()))
    harness.run_leaders(driver, for_s=3.0)
    for node in (0, 1):
        harness.cloud.reclaim_node(TOKEN, node)
    while driver.view.epoch < AGENT_LEADS.epoch + 1:
        harness.clock.wait(0.05)
        driver.tick(harness.clock.now())
    new_leader = an_agent_id(5)
    harness.write(
        LeaderElected(
            leader=new_leader, epoch=driver.view.epoch + 1, coordinator_address="127.0.0.1:5"
        )
    )
    for _ in range(3):  # ticks within the same second
        driver.tick(harness.clock.now())
        harness.clock.wait(0.02)
    assert driver.view.is_leader(new_leader)


def test_remaining_machines_get_time_to_elect_a_leader() -> None:
    harness = start_run()
    driver = harness.headless()
    driver.tick(100.0)
    harness.write(AGENT_LEADS, RoundOpened(round=a_round()))
    harness.cloud.reclaim_node(TOKEN, 0)
    harness.run_leaders(driver, for_s=19.0)
    assert driver.view.is_leader(an_agent_id(0))


def test_machines_without_a_leader_are_not_released() -> None:
    harness = start_run()
    driver = harness.headless()
    driver.tick(100.0)
    harness.write(AGENT_LEADS, RoundOpened(round=a_round()))
    harness.run_leaders(driver, for_s=60.0)
    assert driver.view.is_leader(AgentId("driver")), "its agents may take over again"
    assert driver.view.round == a_round()
    assert harness.cloud.submitted_tokens == [TOKEN]
    assert harness.cloud.cancelled_tokens == []


def test_the_leader_is_done_once_the_run_ended_and_groups_are_released() -> None:
    harness = start_run()
    driver = harness.headless()
    driver.tick(100.0)
    harness.write(AGENT_LEADS, FitEnded(outcome="finished"))
    harness.run_leaders(driver)
    assert harness.clock.now() < 100.0 + CLEANUP_LEASE_TIMEOUT_S + 2.0
    assert driver.view.groups[TOKEN].is_released
    assert driver.tick(harness.clock.now()) is None


def test_pending_groups_are_looked_up_and_released_after_the_end() -> None:
    harness = start_run()
    driver = harness.headless()
    harness.cloud.submit_results = [ConnectionError("no answer")]
    driver.tick(100.0)
    assert driver.view.groups[TOKEN].is_pending
    harness.cloud.submit(driver.view.groups[TOKEN].plan, LAUNCH)  # the request was executed
    harness.write(AGENT_LEADS, FitEnded(outcome="cancelled"))
    assert driver.tick(101.0) is not None, "their outcome is unknown"
    harness.run_leaders(driver)
    assert driver.view.groups[TOKEN].is_released
    assert harness.cloud.groups == {}


def test_pending_groups_that_were_not_granted_are_not_requested_after_the_end() -> None:
    harness = start_run()
    driver = harness.headless()
    harness.cloud.submit_results = [ConnectionError("no answer")]
    driver.tick(100.0)
    harness.write(AGENT_LEADS, FitEnded(outcome="cancelled"))
    harness.run_leaders(driver)
    assert driver.view.groups[TOKEN].refusal == "the fit ended before it was granted"
    assert harness.cloud.submitted_tokens == [TOKEN]
    assert harness.cloud.looked_up_tokens == [TOKEN]


def test_a_request_that_reads_show_late_is_looked_up_until_it_is_found() -> None:
    harness = start_run()
    harness.cloud.traits = Traits(read_lag_s=60.0)
    driver = harness.headless()
    harness.cloud.submit_results = [ConnectionError("no answer")]
    driver.tick(100.0)
    harness.write(AGENT_LEADS, FitEnded(outcome="cancelled"))
    now = 200.0
    while not harness.cloud.looked_up_tokens:
        driver.tick(now)
        now += 1.0
    driver.tick(now)
    assert driver.view.groups[TOKEN].is_pending, "it may be shown later"
    harness.cloud.submit(driver.view.groups[TOKEN].plan, LAUNCH)  # from now on it is shown
    for second in range(1, 20):
        driver.tick(now + second)
    assert driver.view.groups[TOKEN].is_released
    assert harness.cloud.groups == {}


def test_after_the_end_the_leader_gets_time_to_release_machines() -> None:
    harness = start_run()
    driver = harness.headless()
    driver.tick(100.0)
    harness.write(AGENT_LEADS, FitEnded(outcome="finished"))
    for _ in range(8):
        harness.agent.renew_lease()
        harness.run_leaders(driver, for_s=1.0)
    assert driver.view.is_leader(an_agent_id(0))
    assert harness.cloud.cancelled_tokens == []


def test_a_run_led_by_a_headless_leader_can_be_cancelled() -> None:
    harness = start_run()
    driver = harness.headless()
    driver.tick(100.0)
    harness.write(CancelRequested(reason="Ctrl-C"))
    harness.run_leaders(driver)
    ended = driver.view.fit_end
    assert ended is not None
    assert ended.outcome == "cancelled"
    assert harness.cloud.groups == {}


def test_of_two_headless_leaders_one_requests_machines() -> None:
    harness = start_run()
    one, two = harness.headless("one"), harness.headless("two")
    harness.run_leaders(one, two, for_s=60.0)
    assert one.view.is_leader(AgentId("one"))
    assert one.view.epoch == 1, "its lease shows that it is alive"
    assert harness.cloud.submitted_tokens == [TOKEN]
    harness.run_leaders(two, for_s=60.0)
    assert two.view.is_leader(AgentId("two")), "the other one takes over"
    assert harness.cloud.submitted_tokens == [TOKEN]


# --- groups of earlier fits ----------------------------------------------------------------------


def start_after_unsettled_fit(*, was_submitted: bool = True) -> tuple[RunHarness, FakeProvisioner]:
    """A fit on `cloud` after one on another cloud, which the result returns, left a group."""
    harness, earlier = RunHarness(), FakeProvisioner()
    harness.other_clouds["earlier"] = earlier
    request = a_request()
    plan = earlier.plan(request)
    if was_submitted:
        earlier.submit(plan, LAUNCH)
    harness.write(
        FitStarted(spec=replace(SPEC, provisioner="earlier")),
        GroupPlanned(request=request, plan=plan),
        FitEnded(outcome="cancelled"),
        FitStarted(spec=SPEC),
    )
    harness.new_token()  # `TOKEN`
    return harness, earlier


def test_a_group_of_an_earlier_fit_is_released_at_its_own_cloud() -> None:
    harness, earlier = start_after_unsettled_fit()
    driver = harness.headless()
    harness.run_leaders(driver, for_s=5.0)
    assert earlier.groups == {}
    assert driver.view.unsettled_groups == {}
    own = harness.cloud
    seen = {*own.submitted_tokens, *own.cancelled_tokens, *own.looked_up_tokens}
    assert seen == {"t-2"}, "the cloud of this fit never receives the other token"


def test_a_group_of_an_earlier_fit_that_was_never_submitted_is_not_submitted() -> None:
    harness, earlier = start_after_unsettled_fit(was_submitted=False)
    driver = harness.headless()
    harness.run_leaders(driver, for_s=5.0)
    assert earlier.looked_up_tokens == [TOKEN]
    assert earlier.submitted_tokens == []
    assert driver.view.unsettled_groups == {}


def test_a_group_of_an_earlier_fit_is_settled_while_an_agent_leads() -> None:
    harness, earlier = start_after_unsettled_fit()
    driver = harness.headless()
    harness.write(AGENT_LEADS)
    harness.agent.renew_lease()
    harness.run_leaders(driver, for_s=3.0)
    assert driver.view.is_leader(an_agent_id(0))
    assert earlier.groups == {}
    assert driver.view.unsettled_groups == {}


def test_an_earlier_cloud_that_does_not_answer_does_not_delay_the_end() -> None:
    harness, earlier = start_after_unsettled_fit()
    earlier.call_error = ConnectionError("no route")
    driver = harness.headless()
    driver.tick(100.0)
    assert harness.cloud.submitted_tokens == ["t-2"]
    harness.write(CancelRequested(reason="Ctrl-C"))
    harness.run_leaders(driver)
    assert harness.clock.now() < 110.0
    assert driver.view.unsettled_groups.keys() == {TOKEN}, "it is not forgotten"


def test_a_sweep_settles_groups_of_earlier_fits_after_the_end() -> None:
    harness, earlier = start_after_unsettled_fit()
    harness.write(FitEnded(outcome="finished"))
    view = sweep(harness.headless("cron"), harness.clock, duration_s=300.0)
    assert (view.unsettled_groups, earlier.groups) == ({}, {})


def test_a_fit_on_another_cloud_is_not_led_by_the_driver_of_the_fit_before() -> None:
    harness = start_run()
    driver = harness.headless()
    driver.tick(100.0)
    harness.write(FitEnded(outcome="cancelled"), FitStarted(spec=replace(SPEC, provisioner="b")))
    harness.run_leaders(driver, for_s=60.0)
    assert driver.view.leader is None
    assert harness.cloud.submitted_tokens == [TOKEN]
    assert harness.cloud.groups == {}, "it releases the machines of its own fit"


# --- sweep ---------------------------------------------------------------------------------------


def test_a_run_with_a_live_leader_is_left_alone() -> None:
    harness = start_run()
    harness.headless().tick(100.0)
    harness.write(AGENT_LEADS)
    view = sweep(harness.headless("cron"), harness.clock, duration_s=10.0)
    assert view.is_leader(AgentId("a0"))
    assert harness.clock.now() == 110.0


def test_a_run_with_a_dead_leader_is_taken_over() -> None:
    harness = start_run()
    harness.write(AGENT_LEADS)
    view = sweep(harness.headless("cron"), harness.clock, duration_s=30.0)
    assert view.is_leader(AgentId("cron"))
    assert harness.cloud.submitted_tokens, "machines are requested"


def test_a_finished_and_released_run_returns_at_once() -> None:
    harness = start_run()
    harness.write(AGENT_LEADS, FitEnded(outcome="finished"))
    sweep(harness.headless("cron"), harness.clock, duration_s=300.0)
    assert harness.clock.now() == 100.0


def test_machines_left_by_a_dead_leader_are_released() -> None:
    harness = start_run()
    harness.headless().tick(100.0)
    harness.write(AGENT_LEADS, FitEnded(outcome="finished"))
    view = sweep(harness.headless("cron"), harness.clock, duration_s=300.0)
    assert all(group.is_released for group in view.groups.values())
    assert harness.cloud.groups == {}
    assert harness.clock.now() < 120.0, "it returns early"
