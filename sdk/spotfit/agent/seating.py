"""Who sits at the leader's table: connected agents, those that vanished, and what each is doing."""

from __future__ import annotations

from msgspec.structs import replace

from spotfit.agent.ports import Net
from spotfit.core.ids import AgentId, Token
from spotfit.model.events import RankFailure
from spotfit.model.holding import Part
from spotfit.model.watch import Seat
from spotfit.model.wire import Beat, FromLeader, Join
from spotfit.model.world import Notice, Place


class Seating:
    """Seats by agent. The dictionaries are handed out as they are: a beat must cost little."""

    def __init__(self, me: AgentId, net: Net) -> None:
        self._me = me
        self._net = net
        self.seats: dict[AgentId, Seat] = {}
        self.gone: dict[AgentId, float] = {}
        """Whose connection was lost and who did not come back, since when."""
        self.broken: set[AgentId] = set()
        """Whose connection was lost since the round was opened, back or not."""
        self.noticed_at: dict[AgentId, float] = {}
        """When each said when its end will be; who says it again says nothing new."""
        self._notices: dict[AgentId, Notice] = {}
        self.known: dict[tuple[Token, int], AgentId] = {}
        """Who sat here last from each machine."""

    def join(self, agent: AgentId, join: Join, now: float) -> None:
        """Give that agent a seat; its connection is new."""
        if join.notice is not None:
            self._note(agent, join.notice, now)
        self.seats[agent] = Seat(
            join.member,
            now,
            now,
            join.running,
            join.notice,
            join.warm,
            join.unable,
            join.entered,
            join.carrying,
            join.held,
        )
        self.gone.pop(agent, None)
        self.known[join.member.token, join.member.node] = agent

    def lose(self, agent: AgentId, now: float) -> bool:
        """Its connection is gone; whether it had a seat."""
        if self.seats.pop(agent, None) is None:
            return False
        self.gone[agent] = now
        self.broken.add(agent)
        return True

    def forget(self, token: Token, node: int, agent: AgentId | None) -> None:
        """That machine is given up for good, or that agent of it."""
        if agent is None or self.known.get((token, node)) == agent:
            self.known.pop((token, node), None)
        if agent is not None:
            self.gone.pop(agent, None)

    def heard(self, agent: AgentId, now: float) -> Seat | None:
        """That agent said something; its seat, if it has one."""
        seat = self.seats.get(agent)
        if seat is not None:
            seat = self.seats[agent] = replace(seat, heard=now)
        return seat

    def occupy(self, places: tuple[Place, ...], number: int) -> None:
        """Whoever has a place in the round is busy until it says `Stopped`.

        Who is not here any more was lost since the round was decided.
        """
        self.broken.clear()
        for place in places:
            if place.agent in self.seats:
                self.seats[place.agent] = replace(self.seats[place.agent], running=number)
            else:
                self.broken.add(place.agent)

    def stopped(
        self,
        agent: AgentId,
        number: int,
        *,
        carrying: bool = False,
        held: tuple[Part, ...] = (),
    ) -> None:
        """No worker of that round, or of an older one, lives there any more."""
        seat = self.seats[agent]
        still = seat.running if seat.running is not None and number < seat.running else None
        self.seats[agent] = replace(
            seat,
            running=still,
            entered=max(seat.entered, number),
            carrying=number if carrying else seat.carrying,
            held=held,
        )

    def delivered(self, agent: AgentId, number: int) -> None:
        """No checkpoint of that round is being uploaded there any more."""
        if self.seats[agent].carrying == number:
            self.seats[agent] = replace(self.seats[agent], carrying=None)

    def can_enter(self, place: Place, number: int) -> bool:
        """Whether that place's agent is here and has not left this round behind already."""
        seat = self.seats.get(place.agent)
        return seat is not None and seat.entered < number

    def warned(self, agent: AgentId, notice: Notice, now: float) -> None:
        """That machine announced its end, or a nearer one."""
        self._note(agent, notice, now)
        self.seats[agent] = replace(self.seats[agent], notice=notice)

    def _note(self, agent: AgentId, notice: Notice, now: float) -> None:
        if self._notices.get(agent) != notice:
            self._notices[agent] = notice
            self.noticed_at[agent] = now

    def spoiled(self, agent: AgentId, failure: RankFailure) -> None:
        """No worker can ever be started there."""
        self.seats[agent] = replace(self.seats[agent], unable=failure)

    def warmed(self, agent: AgentId) -> None:
        """Workers would start there at once."""
        self.seats[agent] = replace(self.seats[agent], warm=True)

    def silent(self, silent_s: float, now: float) -> list[AgentId]:
        """Who has not been heard for too long."""
        return [
            agent
            for agent, seat in self.seats.items()
            if agent != self._me and now - seat.heard > silent_s
        ]

    def stopped_all(self, places: tuple[Place, ...]) -> bool:
        """Whether nobody of these places has workers any more, or a connection."""
        seats = (self.seats.get(place.agent) for place in places)
        return all(seat is None or seat.running is None for seat in seats)

    def tell_all(self, message: FromLeader) -> None:
        """To everybody seated."""
        for agent in self.seats:
            self._net.send_down(agent, message)

    def greet_all(self) -> None:
        """The leader's beat."""
        self.tell_all(Beat())
