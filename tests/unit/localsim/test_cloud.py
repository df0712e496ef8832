"""A cloud that is asked twice gives once, and what it takes back it takes for good."""

from collections.abc import Callable
from typing import Any

import pytest

from spotfit.core.ids import RunId, Token
from spotfit.model.group import GroupHandle, GroupRequest, NodeState
from spotfit.provision.api import Refusal
from spotfit.provision.launch import Launch
from spotfit_localsim.cloud import Box, Cloud, Forgetful, SimProvisioner
from spotfit_localsim.market import Market, Tide
from spotfit_localsim.traces import Trace
from tests.unit.localsim.ground import Ground

LAUNCH = Launch("sim://run", RunId("r"), "secret")


class Tenants:
    """Notes who came and went."""

    def __init__(self) -> None:
        self.booted: list[str] = []
        self.evicted: list[tuple[str, bool]] = []

    def boot(self, box: Box) -> None:
        self.booted.append(box.name)

    def evict(self, box: Box, *, told: bool) -> None:
        self.evicted.append((box.name, told))


class Sky:
    """A cloud with a client."""

    def __init__(self, kind: type[SimProvisioner] = SimProvisioner, /, **market: Any) -> None:
        self.ground = Ground()
        self.tide = Tide(Market(**market), self.ground.dice.stream("market"))
        self.cloud = Cloud(self.ground.engine, self.tide, self.ground.say)
        self.tenants = self.cloud.tenant = Tenants()
        self.kind = kind

    def ask(self, *jobs: Callable[[SimProvisioner], Any]) -> list[Any]:
        """A process calls the provisioner."""
        process = self.ground.process()
        client = self.kind(self.cloud, self.tide, process, slots=2)
        return self.ground.do(process, *(lambda job=job: job(client) for job in jobs))

    def submit(self) -> Any:
        return self.ask(lambda client: client.submit(plan_of(client, "t1", 4), LAUNCH))[0]

    def rest(self, seconds: float) -> None:
        self.ground.engine.at(self.ground.engine.now + seconds, lambda: None)
        self.ground.engine.run(until=self.ground.engine.now + seconds)


def plan_of(client: SimProvisioner, token: str, workers: int) -> Any:
    return client.plan(GroupRequest(Token(token), workers, of=8))


def test_asking_twice_is_asking_once() -> None:
    sky = Sky()
    assert sky.submit() == sky.submit()
    assert sorted(sky.tenants.booted) == ["t1.0", "t1.1"]
    assert sky.cloud.orders.keys() == {"t1"}


def test_one_that_forgets_its_token_is_paid_twice() -> None:
    sky = Sky(Forgetful)
    sky.submit()
    sky.submit()
    assert len(sky.tenants.booted) == 4


def test_a_machine_is_waiting_then_running_and_in_the_end_gone() -> None:
    sky = Sky(boot_s=(10.0, 10.0), observed_after_s=(2.0, 2.0))
    process = sky.ground.process()
    client = SimProvisioner(sky.cloud, sky.tide, process, slots=2)
    handle = GroupHandle(Token("t1"), "sim", "sim-t1", {"nodes": 1})
    sky.cloud.request(plan_of(client, "t1", 2), LAUNCH)
    states = []
    for moment in (5.0, 11.0, 12.0):
        sky.rest(moment - sky.ground.engine.now)
        states.append(sky.cloud.status(handle.token, 1).nodes[0].state)
        if moment == 11.0:
            sky.cloud.release(handle.token)
    sky.rest(3.0)
    states.append(sky.cloud.status(handle.token, 1).nodes[0].state)
    assert states == [NodeState.WAITING, NodeState.RUNNING, NodeState.RUNNING, NodeState.GONE]
    assert sky.tenants.evicted == [("t1.0", True)]
    assert sky.cloud.machine_seconds == pytest.approx(11.05)


def test_a_group_nobody_remembers_is_gone() -> None:
    sky = Sky()
    handle = GroupHandle(Token("never"), "sim", "sim-never", {"nodes": 2})
    status = sky.ask(lambda client: client.observe(handle), lambda client: client.cancel(handle))
    assert status[0].over
    assert status[1] is None


def test_a_lost_answer_has_its_effect() -> None:
    sky = Sky(lost_answers=1.0)
    assert isinstance(sky.submit(), ConnectionError)
    assert sorted(sky.tenants.booted) == ["t1.0", "t1.1"]


def test_a_market_that_refuses_promises_nothing() -> None:
    sky = Sky(refuses=True, capacity=Trace("none", ((0.0, 1),)))
    assert isinstance(sky.submit(), Refusal)
    assert not sky.cloud.orders


def test_machines_wait_for_capacity_and_go_when_it_goes() -> None:
    ebb = Trace("ebb", ((0.0, 1), (100.0, 2), (200.0, 0)))
    sky = Sky(capacity=ebb, boot_s=(1.0, 1.0))
    process = sky.ground.process()
    client = SimProvisioner(sky.cloud, sky.tide, process, slots=2)
    sky.cloud.request(plan_of(client, "t1", 4), LAUNCH)
    sky.rest(50.0)
    assert len(sky.tenants.booted) == 1
    assert sky.cloud.status(Token("t1"), 2).refusal == "waiting for capacity"
    sky.rest(100.0)
    assert len(sky.tenants.booted) == 2
    sky.rest(100.0)
    assert len(sky.tenants.evicted) == 2


def test_a_notice_comes_before_the_end() -> None:
    sky = Sky(notice_s=30.0)
    sky.submit()
    box = sky.cloud.running()[0]
    sky.cloud.reclaim(box, notice=True)
    assert box.notice is not None
    assert box.notice.seconds_left == 30.0
    sky.rest(29.0)
    assert box in sky.cloud.running()
    sky.rest(2.0)
    assert box not in sky.cloud.running()
    assert sky.tenants.evicted == [(box.name, True)]


def test_some_machines_never_speak() -> None:
    sky = Sky(dead_boots=1.0)
    sky.submit()
    assert sky.tenants.booted == []
    assert len(sky.cloud.running()) == 2
