"""A run that chooses its offers, as a journal that tests write entry by entry."""

from __future__ import annotations

from typing import Any

from spotfit.core.ids import Token
from spotfit.model.events import (
    FitStarted,
    GroupPlanned,
    GroupRefused,
    GroupSubmitted,
    GroupWaiting,
    JournalEvent,
    LeaderElected,
    MachinesChosen,
    MachinesObserved,
    MachineTimes,
    RoundOpened,
    TrainingFunctionStarted,
)
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest, NodeState
from spotfit.model.leader_state import LeaderState, MemberStatus
from spotfit.model.offer import Market, Offer, Price
from spotfit.model.spec import CostSpec, FeederSpec, RunTiming
from spotfit.model.topology import Round
from spotfit.model.view import JournalView, View, fold
from spotfit.testing.builders import (
    a_group_status,
    a_leader_state,
    a_member,
    a_member_status,
    a_round,
    a_spec,
    an_agent_id,
    an_entry,
    member_statuses,
)

T0_MS = 1_000_000_000_000
LEASE_S = 20.0
START_S = 100.0
HOUR_S = 3600.0


def an_offer(name: str, usd: float | None, market: Market = Market.SPOT, **fields: Any) -> Offer:
    price = None if usd is None else Price(usd_per_hour=usd, source="given", as_of_s=0.0)
    return Offer(name=name, provisioner="local", market=market, price=price, **fields)


SPOT = an_offer("spot", 1.0)
DEARER = an_offer("dearer", 1.1)
ON_DEMAND = an_offer("on-demand", 4.0, Market.ON_DEMAND)


class OfferedRun:
    """A fit of two workers that started at T0, with SPOT, and ON_DEMAND as fallback.

    `workers` are the smallest and the largest number of them, if the group is elastic.
    """

    def __init__(
        self,
        *offers: Offer,
        workers: tuple[int, int] = (2, 2),
        feeders: FeederSpec | None = None,
        **cost: Any,
    ) -> None:
        self._offers = offers or (SPOT, ON_DEMAND)
        self._machines = {offer.name: workers[1] for offer in self._offers}
        usual: dict[str, Any] = {
            "offers": self._offers,
            "machines": self._machines,
            "uses_on_demand": True,
            "start_time_s": START_S,
        }
        spec = a_spec(
            min_workers=workers[0],
            max_workers=workers[1],
            cost=CostSpec(**{**usual, **cost}),
            feeders=feeders,
            timing=RunTiming(heartbeat_timeout_s=0.0, lease_timeout_s=LEASE_S),
        )
        self.journal: JournalView = JournalView()
        self.round: Round | None = None
        self.members: list[MemberStatus] = []
        self.add(0, FitStarted(spec=spec))
        leader = LeaderElected(
            leader=an_agent_id(0), epoch=1, coordinator_address=a_member(0).coordinator_address
        )
        self.add(0, leader)

    @property
    def view(self) -> View:
        assert isinstance(self.journal, View)
        return self.journal

    def add(self, at_s: float, *events: JournalEvent) -> None:
        for event in events:
            entry = an_entry(event, elapsed_s=at_s, written_at_ms=T0_MS + round(at_s * 1000))
            self.journal = fold(self.journal, entry)

    def choose(self, at_s: float, *names: str, standing: str = "") -> None:
        workers = dict.fromkeys(names, 2)
        self.add(at_s, MachinesChosen(workers=workers, standing_offer=standing))

    def choose_workers(self, at_s: float, standing: str = "", /, **workers: int) -> None:
        """Record a choice with these numbers of workers; "_" in a name stands for "-"."""
        named = {name.replace("_", "-"): count for name, count in workers.items()}
        self.add(at_s, MachinesChosen(workers=named, standing_offer=standing))

    def request(
        self, at_s: float, token: str, offer: Offer, *, nodes: int = 2, network: str = ""
    ) -> None:
        """Plan and submit a group of two machines."""
        name = Token(token)
        request = GroupRequest(token=name, num_workers=nodes, total_workers=2, offer=offer)
        plan = GroupPlan(token=name, provisioner="local", num_nodes=nodes, slots_per_node=1)
        handle = GroupHandle(token=name, provisioner="local", name=token, network=network)
        self.add(
            at_s,
            GroupPlanned(request=request, plan=plan),
            GroupSubmitted(token=name, handle=handle),
        )

    def refuse(self, at_s: float, token: str, offer: Offer, **fields: Any) -> None:
        """Plan a group that its backend refuses."""
        name = Token(token)
        request = GroupRequest(token=name, num_workers=2, total_workers=2, offer=offer)
        plan = GroupPlan(token=name, provisioner="local", num_nodes=2, slots_per_node=1)
        self.add(
            at_s,
            GroupPlanned(request=request, plan=plan),
            GroupRefused(token=name, **{"reason": "no capacity", **fields}),
        )

    def wait_at_backend(self, at_s: float, token: str) -> None:
        """Record that the backend has no machines for a group yet."""
        self.add(at_s, GroupWaiting(token=Token(token), reason="no capacity"))

    def bill(self, at_s: float, token: str, *, started_s: float, nodes: int = 2) -> None:
        """Record when the machines of a group have started."""
        at_ms = T0_MS + round(started_s * 1000)
        times = tuple(MachineTimes(node=n, started_ms=(at_ms, at_ms)) for n in range(nodes))
        self.add(at_s, MachinesObserved(times={Token(token): times}))

    def connect(self, token: str, *, first: int = 0, nodes: int = 2) -> None:
        """Connect the agents of the machines of a group; `first` is the number of the first."""
        self.members += [
            a_member_status(first + n, member=a_member(first + n, token=Token(token), node=n))
            for n in range(nodes)
        ]

    def train(self, at_s: float, *, startup_s: float = 10.0) -> None:
        """Open a round of the connected machines, and call its training function."""
        self.round = a_round(members=[one.member for one in self.members])
        self.add(at_s, RoundOpened(round=self.round))
        self.add(at_s + startup_s, TrainingFunctionStarted(round_number=1, startup_s=startup_s))

    def state(self, at_s: float, **fields: Any) -> LeaderState:
        """What the leader observes at that time of the fit; its clock is that of the storage."""
        connected = {one.member.token for one in self.members}
        statuses = {
            token: a_group_status(
                *[NodeState.RUNNING if token in connected else NodeState.WAITING]
                * group.plan.num_nodes
            )
            for token, group in self.view.groups.items()
        }
        usual: dict[str, Any] = {
            "group_statuses": statuses,
            "is_headless": not self.members,
            "members": member_statuses(*self.members),
            "elapsed_s": at_s,
            "wall_ms": T0_MS + round(at_s * 1000),
        }
        return a_leader_state(**{**usual, **fields})
