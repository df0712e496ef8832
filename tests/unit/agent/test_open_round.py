"""The open round: workers hear what concerns them, and callbacks hear things in their order."""

from __future__ import annotations

from typing import Any

import msgspec

from spotfit.agent.hub import Hub
from spotfit.agent.open_round import OpenRound
from spotfit.agent.reports import ReportSink
from spotfit.agent.staging import Staging
from spotfit.agent.tidying import Tidying
from spotfit.agent.warden import PATIENCE_S, Warden
from spotfit.control.errands import Inline
from spotfit.core.codec import encode
from spotfit.core.ids import AgentId
from spotfit.ledger.run import Ledger
from spotfit.model.spec import Vigil
from spotfit.model.wire import (
    Down,
    Files,
    FromLeader,
    FromWorker,
    Named,
    Preempted,
    Present,
    Proceed,
    Report,
    Running,
    Saved,
    Up,
)
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import (
    RUN,
    a_notice,
    a_round,
    a_spec,
    a_view,
    a_watch,
    an_agent,
)
from tests.unit.agent.world import FakeHooks
from tests.unit.control.paper import Slow

NOTHING = msgspec.Raw(b"{}")


class Mail:
    """A `Net` that only ever speaks."""

    def __init__(self) -> None:
        self.sent: list[tuple[AgentId, FromLeader]] = []

    def send_down(self, agent: AgentId, message: FromLeader) -> None:
        self.sent.append((agent, message))

    def of(self, kind: type) -> list[tuple[AgentId, Any]]:
        """The frames of that kind, with who got them, since it was last asked for any."""
        sent, self.sent = self.sent, []
        told = [(agent, one.frame) for agent, one in sent if isinstance(one, Down)]
        return [(agent, frame) for agent, frame in told if isinstance(frame, kind)]


class Listener:
    """An `Audience` that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str | None] = []

    def reported(self, metrics: Any, checkpoint: str | None) -> None:
        self.heard.append(checkpoint)


class House:
    """Round 3, one worker on each of two machines."""

    def __init__(self, **vigil: Any) -> None:
        self.mail, self.listener, self.hooks, self.slow = Mail(), Listener(), FakeHooks(), Slow()
        ledger = Ledger(MemoryStore(), RUN, an_agent(0))
        hub = Hub(3, 2, name_for=lambda n: f"made-{n}")
        self.tidying = Tidying(ledger.store, self.slow)
        self.round = OpenRound(
            a_round(3),
            hub,
            Warden(hub, Vigil(**vigil), ask=lambda _: None, ledger=ledger, errands=Inline()),
            Staging(hub, self.hooks, {}),
            net=self.mail,  # type: ignore[arg-type]  # it only speaks
            tidying=self.tidying,
            reports=ReportSink(ledger, Inline()),
            audience=self.listener,  # type: ignore[arg-type]  # it only hears
        )

    def say(self, frame: FromWorker, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            up = Up(3, rank, [msgspec.Raw(encode(frame))])
            assert self.round.take(an_agent(rank), up, 0.0) is None


def test_names_go_to_who_asked_and_news_to_all() -> None:
    house = House()
    house.say(Report(0, NOTHING), 0)
    house.say(Files(0, NOTHING), 1)
    assert [(agent, one.name) for agent, one in house.mail.of(Named)] == [(an_agent(1), "made-0")]
    house.round.answer([(None, Proceed("form"))])
    assert [agent for agent, _ in house.mail.of(Proceed)] == [an_agent(0), an_agent(1)]


def test_nobody_speaks_for_another_machines_rank() -> None:
    house = House()
    up = Up(3, 1, [msgspec.Raw(encode(Running()))])
    assert house.round.take(an_agent(0), up, 0.0) is None
    assert house.round.take(AgentId("a stranger"), up, 0.0) is None
    assert house.round.hub.running == set()


def test_nonsense_is_a_failure_and_what_was_said_beside_it_is_heard() -> None:
    house = House()
    frames = [msgspec.Raw(b'{"type": "nonsense"}'), msgspec.Raw(encode(Running()))]
    failure = house.round.take(an_agent(1), Up(3, 1, frames), 0.0)
    assert failure is not None
    assert (failure.rank, failure.kind) == (1, "died")
    assert "something unreadable" in failure.told
    assert house.round.hub.running == {1}


def test_callbacks_hear_of_nothing_before_the_checkpoint_that_came_before_it_is_committed() -> None:
    house = House()
    house.say(Files(0, NOTHING))
    house.say(Saved(0, "made-0", 1))
    house.say(Report(1, NOTHING))
    house.round.tell_matched()
    assert house.listener.heard == []
    house.round.hub.ready = []  # its entry is written
    house.round.tell_matched()
    assert house.listener.heard == ["made-0", None]


def test_all_are_told_who_goes_and_nobody_waits_for_them_where_that_is_wanted() -> None:
    house = House()
    notices = {an_agent(1): a_notice()}
    house.round.announce(a_view(round=a_round(3)), a_watch(), 0.0)
    assert house.mail.sent == [], "nobody goes"
    view = a_view(round=a_round(3), notices=notices, spec=a_spec(relax_collectives=True))
    house.round.announce(view, a_watch(), 0.0)
    told = house.mail.of(Preempted)
    assert [agent for agent, _ in told] == [an_agent(0), an_agent(1)]
    assert [ranks for _, one in told for ranks in one.nodes.values()] == [(1,), (1,)]
    house.say(Files(0, NOTHING), 0)
    assert [one.ranks for _, one in house.mail.of(Named)] == [(0,)], "rank 1 is not waited for"


def test_a_hang_is_told_where_nobody_can_be_waiting_for_a_validation() -> None:
    house = House(hang_s=60.0)
    house.say(Running())
    assert house.round.look_for_hangs(a_view(), 0.0) is None
    assert house.round.next_wake(0.0) == 60.0
    assert house.round.look_for_hangs(a_view(), 60.0) is None, "it is looked into"
    found = house.round.look_for_hangs(a_view(), 60.0 + PATIENCE_S)
    assert found is not None
    assert found.hang.ranks == (0, 1)


def test_a_round_that_is_over_waits_for_no_hook() -> None:
    house = House()
    house.say(Present("form"))
    house.round.proceed()
    assert house.hooks.ordered == [("on_start", 3, 2)]
    house.hooks.left = []
    house.round.proceed()
    assert [agent for agent, _ in house.mail.of(Proceed)] == [an_agent(0), an_agent(1)]
    house.round.lose_workers()
    house.round.close()
    assert house.hooks.ordered[-1] == ("on_shutdown", 3, 2), "what was started is shut down"
