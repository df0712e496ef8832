"""A run whose bucket another process without the run key can write to."""

from __future__ import annotations

import pytest

from spotfit.checkpoint.manifest import Manifest
from spotfit.core.codec import encode
from spotfit.core.ids import AgentId, Token
from spotfit.ledger import keys
from spotfit.model.events import (
    CancelRequested,
    CheckpointCommitted,
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupSubmitted,
    JournalEvent,
    LeaderElected,
)
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest
from spotfit.protocol.agent_leader import JournalEntryCopy
from spotfit.security.object_mac import ObjectMac
from spotfit.testing.builders import RUN_KEY, a_spec
from tests.unit.agent.simulated_cluster import FakeCluster

FORGED = Token("t-forged")
SHELL = "touch /tmp/forged"


def forged_plan(provisioner: str) -> GroupPlanned:
    request = GroupRequest(token=FORGED, num_workers=1, total_workers=1)
    plan = GroupPlan(
        token=FORGED,
        provisioner=provisioner,
        num_nodes=1,
        slots_per_node=1,
        body={"command": SHELL, "script": SHELL, "arguments": ["--uid=root"]},
    )
    return GroupPlanned(request=request, plan=plan)


@pytest.mark.parametrize("provisioner", ["sim", "ssh", "slurm"])
def test_a_forged_fit_and_plan_start_no_machine_and_the_run_continues(provisioner: str) -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.append_without_key(FitStarted(spec=a_spec(provisioner=provisioner)))
    world.append_without_key(forged_plan(provisioner))
    world.advance(10.0)
    world.checkpoint(0, "c1")
    assert FORGED not in world.cloud.submitted_tokens
    assert world.is_training
    assert world.view.spec.provisioner == "local"
    assert [each.name for each in world.view.checkpoints] == ["c1"]


def test_a_new_leader_opens_the_provisioner_of_the_authentic_fit() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.append_without_key(
        FitStarted(spec=a_spec(provisioner="ssh", provisioner_options={"hosts": ["evil"]}))
    )
    world.kill(world.leader)
    world.advance_until(lambda: world.is_training)
    assert world.view.spec.provisioner == "local"
    assert world.view.fit_count == 1


def test_a_replayed_plan_is_not_submitted_again() -> None:
    world = FakeCluster()
    world.wait_for_round()
    slot = next(n for n, entry in enumerate(world.entries) if isinstance(entry.event, GroupPlanned))
    submitted = list(world.cloud.submitted_tokens)
    body = world.bucket.objects[keys.entry(slot)]
    world.bucket.write("outsider", keys.entry(len(world.entries)), body)
    world.advance(10.0)
    assert world.cloud.submitted_tokens == submitted
    assert world.is_training


@pytest.mark.parametrize(
    "event",
    [
        FitEnded(outcome="finished"),
        LeaderElected(leader=AgentId("a-evil"), epoch=99, coordinator_address="evil:1"),
        GroupSubmitted(
            token=Token("t-unknown"),
            handle=GroupHandle(token=Token("t-unknown"), provisioner="ssh", name="evil"),
        ),
    ],
    ids=["end", "election", "unknown group"],
)
def test_other_forged_entries_change_nothing(event: JournalEvent) -> None:
    world = FakeCluster()
    world.wait_for_round()
    before = world.view
    world.append_without_key(event)
    world.advance(10.0)
    assert world.is_training
    assert (world.view.leader, world.view.epoch) == (before.leader, before.epoch)
    assert world.view.groups == before.groups


def test_agents_act_on_a_cancellation_without_the_key() -> None:
    world = FakeCluster()
    world.wait_for_round()
    world.append_without_key(CancelRequested(reason="enough"))
    world.advance_until(lambda: world.view.fit_end)
    assert world.last_event(FitEnded).outcome == "cancelled"


def test_a_new_leader_does_not_commit_a_forged_checkpoint() -> None:
    world = FakeCluster()
    world.wait_for_round()
    part = Manifest(name="c9", round=1, report_index=0, rank=0, ranks=(0,), metrics={}, files=())
    world.bucket.write("outsider", part.key, encode(part))
    world.kill(world.leader)
    world.advance_until(lambda: world.is_training)
    assert world.events_of(CheckpointCommitted) == []


@pytest.mark.parametrize("slot_offset", [0, 5, 10**12])
def test_a_forged_copy_of_an_entry_does_not_change_the_state_of_an_agent(slot_offset: int) -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    follower = next(node for node in cluster.nodes.values() if node is not cluster.leader)
    slot = follower.ledger.view.next_slot + slot_offset
    for body in (b"garbage", b"[" * 5_000, b"\xff"):
        cluster.leader.net.send_to_agent(follower.agent_id, JournalEntryCopy(slot=slot, body=body))
    cluster.advance(1.0)
    cluster.checkpoint(0, "c1")
    assert follower.ledger.view.latest_checkpoint is not None
    assert not follower.has_exited
    assert follower.agent._journal_writer.is_settled


def test_a_copy_that_is_no_entry_although_it_has_a_mac_does_not_end_an_agent() -> None:
    cluster = FakeCluster()
    cluster.wait_for_round()
    follower = next(node for node in cluster.nodes.values() if node is not cluster.leader)
    slot = follower.ledger.view.next_slot
    body = ObjectMac(RUN_KEY).add(keys.entry(slot), b'{"not":"an entry"}')
    cluster.leader.net.send_to_agent(follower.agent_id, JournalEntryCopy(slot=slot, body=body))
    cluster.advance(1.0)
    cluster.checkpoint(0, "c1")
    assert follower.ledger.view.latest_checkpoint is not None
    assert not follower.has_exited
