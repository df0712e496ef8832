"""The wire keeps its order, tells of what broke, and says nothing of a wall."""

from spotfit.agent.ports import AgentLost, FromAgent, FromHub, HubLost
from spotfit.core.ids import AgentId, RunId, Token
from spotfit.model.wire import Beat, Halt, Join, Stopped
from spotfit.model.world import Member
from spotfit_localsim.engine import Process
from spotfit_localsim.net import DIAL_PATIENCE_S, Fabric, SimNet, Wall
from tests.unit.localsim.ground import Ground


class Party:
    """Some agents that live and do nothing but have a net each."""

    def __init__(self, *names: str) -> None:
        self.ground = Ground()
        self.fabric = Fabric(self.ground.engine, self.ground.dice.stream("wire"))
        self.processes: dict[str, Process] = {}
        self.nets: dict[str, SimNet] = {}
        for name in names:
            process = self.processes[name] = self.ground.idle(name)
            self.nets[name] = SimNet(self.fabric, process, host=name, me=AgentId(name))

    def join(self, name: str) -> Join:
        member = Member(AgentId(name), name, f"{name}:7000", 1, Token("t"), 0)
        return Join(RunId("r"), member, 0)

    def dial(self, name: str, hub: str) -> None:
        self.nets[name].dial(f"{hub}:7000", self.join(name))
        self.rest()

    def rest(self, seconds: float = 1.0) -> None:
        """Let time pass."""
        self.ground.engine.run(until=self.ground.engine.now)
        self.ground.engine.at(self.ground.engine.now + seconds, lambda: None)
        self.ground.engine.run(until=self.ground.engine.now + seconds)

    def heard(self, name: str) -> list[object]:
        return list(self.nets[name].events())


def test_messages_arrive_in_order_after_the_join() -> None:
    party = Party("hub", "one")
    party.nets["one"].dial("hub:7000", party.join("one"))
    for number in range(20):
        party.nets["one"].send_up(Stopped(number))
    party.rest()
    messages = [event.message for event in party.heard("hub") if isinstance(event, FromAgent)]
    assert messages == [party.join("one"), *(Stopped(number) for number in range(20))]
    for number in range(20):
        party.nets["hub"].send_down(AgentId("one"), Halt(number))
    party.rest()
    assert party.heard("one") == [FromHub(Halt(number)) for number in range(20)]


def test_who_dials_itself_takes_no_wire() -> None:
    party = Party("one")
    net = party.nets["one"]
    net.dial("one:7000", party.join("one"))
    net.send_up(Beat())
    net.send_down(AgentId("one"), Halt(1))
    assert [type(event) for event in net.events()] == [FromAgent, FromAgent, FromHub]
    net.dismiss(AgentId("one"))
    assert [type(event) for event in net.events()] == [HubLost]


def test_nobody_listens_there() -> None:
    party = Party("one")
    party.dial("one", "nobody")
    assert party.heard("one") == [HubLost("nobody:7000", "connection refused", vanished=True)]


def test_a_machine_that_fell_silent_only_does_not_answer() -> None:
    party = Party("hub", "one")
    party.fabric.silence("hub")
    party.dial("one", "hub")
    assert party.heard("one") == []
    party.rest(DIAL_PATIENCE_S)
    assert party.heard("one") == [HubLost("hub:7000", "no answer", vanished=False)]


def test_a_hub_that_dies_is_told_of_and_one_that_falls_silent_is_not() -> None:
    for silent in (False, True):
        party = Party("hub", "one")
        party.dial("one", "hub")
        if silent:
            party.fabric.silence("hub")
        party.nets["hub"].close()
        party.rest()
        assert [type(event) for event in party.heard("one")] == ([] if silent else [HubLost])


def test_an_agent_that_hangs_up_or_dies_is_told_of_once() -> None:
    party = Party("hub", "one")
    party.dial("one", "hub")
    party.heard("hub")
    party.nets["one"].close()
    party.rest()
    assert party.heard("hub") == [AgentLost(AgentId("one"), "it hung up")]


def test_a_dismissed_agent_learns_it_and_the_hub_hears_no_more_of_it() -> None:
    party = Party("hub", "one")
    party.dial("one", "hub")
    party.heard("hub")
    party.nets["hub"].dismiss(AgentId("one"))
    party.nets["one"].send_up(Beat())
    party.rest()
    assert party.heard("hub") == []
    assert [type(event) for event in party.heard("one")] == [HubLost]


def test_a_second_call_replaces_the_first() -> None:
    party = Party("hub", "one")
    party.dial("one", "hub")
    party.dial("one", "hub")
    kinds = [type(event) for event in party.heard("hub")]
    assert kinds == [FromAgent, AgentLost, FromAgent]
    party.nets["hub"].send_down(AgentId("one"), Halt(1))
    party.rest()
    assert party.heard("one") == [FromHub(Halt(1))]


def test_behind_a_wall_messages_wait_and_then_come_in_order() -> None:
    party = Party("hub", "one")
    party.dial("one", "hub")
    party.heard("hub")
    wall = Wall("hub", outwards=False, inwards=True)
    party.fabric.build(wall)
    party.nets["one"].send_up(Stopped(1))
    party.nets["one"].send_up(Stopped(2))
    party.nets["hub"].send_down(AgentId("one"), Halt(9))
    party.rest(30.0)
    assert party.heard("hub") == []
    assert party.heard("one") == [FromHub(Halt(9))]
    party.fabric.tear_down(wall)
    party.rest()
    told = [event.message for event in party.heard("hub") if isinstance(event, FromAgent)]
    assert told == [Stopped(1), Stopped(2)]


def test_a_cut_connection_is_told_at_both_ends() -> None:
    party = Party("hub", "one")
    party.dial("one", "hub")
    party.heard("hub")
    next(iter(party.fabric.connections)).reset()
    assert [type(event) for event in party.heard("one")] == [HubLost]
    assert [type(event) for event in party.heard("hub")] == [AgentLost]
    assert not party.fabric.connections
