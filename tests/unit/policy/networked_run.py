"""A run whose machines train in network a, while those of network b start."""

from __future__ import annotations

from typing import Any

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import FailureCause, LeaderElected, RoundClosed
from spotfit.model.leader_state import StandbyStatus
from spotfit.model.offer import Market
from spotfit.model.topology import StandbyReport
from spotfit.testing.builders import a_member, an_agent_id
from tests.unit.policy.offered_run import OfferedRun, an_offer

NEAR = an_offer("near", 4.0, Market.ON_DEMAND, network="a")
FAR = an_offer("far", 1.0, network="b")
FIRST, SECOND = Token("t-1"), Token("t-2")


def a_networked_run(*, chosen: str = "far", **cost: Any) -> OfferedRun:
    """Two machines train in network a since 110 s; two of network b are requested at 200 s."""
    run = OfferedRun(NEAR, FAR, **cost)
    run.choose(0, "near")
    run.request(0, FIRST, NEAR, network="a")
    run.connect(FIRST)
    elect(run, 10, 0, network="a")
    run.train(100)
    run.choose(200, chosen)
    run.request(200, SECOND, FAR, network="b")
    return run


def elect(run: OfferedRun, at_s: float, agent: int, *, network: str) -> None:
    run.add(
        at_s,
        LeaderElected(
            leader=an_agent_id(agent),
            epoch=run.view.epoch + 1,
            coordinator_address=a_member(agent).coordinator_address,
            network=network,
        ),
    )


def close_round(run: OfferedRun, at_s: float) -> None:
    run.add(at_s, RoundClosed(round_number=1, cause=FailureCause.RESIZE, reason="moving"))


def standby(
    *agents: int, token: Token = SECOND, is_proven: bool = True, **fields: Any
) -> dict[AgentId, StandbyStatus]:
    """The reports of these agents, on consecutive machines of the group."""
    return {
        an_agent_id(agent): StandbyStatus(
            report=StandbyReport(
                **{
                    "member": a_member(agent, token=token, node=node),
                    "renewal": 2,
                    "is_warm": True,
                    **fields,
                }
            ),
            is_proven=is_proven,
        )
        for node, agent in enumerate(agents)
    }
