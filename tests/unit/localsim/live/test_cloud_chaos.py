"""What a chaos run on a cloud may do: rent machines, release them, end."""

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import NodeLost, RoundOpened
from spotfit.model.group import Unreachable
from spotfit.model.topology import NodeAssignment, Round
from spotfit.policy.retry_budget import unreachable_remedy
from spotfit_localsim.clouds.cloud_host import ENDED, OUT_OF_MEMORY, RECLAIMED
from spotfit_localsim.live.cloud_chaos import (
    DriverOutcome,
    check_machine_count,
    check_refused_run,
    has_unreported_release,
)
from spotfit_localsim.live.cloud_plans import CloudChaosPlan

PLAN = CloudChaosPlan(1, "aws_batch", machines=2)
RELEASED = NodeLost(token=Token("t"), node=0, agent=None, reason="", is_unused=True)


def machine(
    end_reason: str = ENDED, *, exit_code: int | None = 0, noticed: bool = False
) -> dict[str, Any]:
    return {
        "end_reason": end_reason,
        "exit_code": exit_code,
        "noticed_at_s": 1.0 if noticed else None,
    }


NEEDED = [machine(), machine()]


def test_needed_machines_are_permitted() -> None:
    assert check_machine_count(PLAN, NEEDED, [], fits=1) == []


def test_a_machine_without_a_reason_is_a_violation() -> None:
    (violation,) = check_machine_count(PLAN, [*NEEDED, machine()], [], fits=1)
    assert violation.startswith("3 machines were rented, at most 2 were needed: 0 lost")


@pytest.mark.parametrize(
    "lost",
    [
        machine(RECLAIMED, exit_code=None),
        machine(OUT_OF_MEMORY, exit_code=137),
        machine(noticed=True),
    ],
    ids=["preempted", "memory", "left after a notice"],
)
def test_a_lost_machine_permits_one_more(lost: dict[str, Any]) -> None:
    assert check_machine_count(PLAN, [lost, *NEEDED], [], fits=1) == []
    assert check_machine_count(PLAN, [lost, machine(), *NEEDED], [], fits=1)


def test_a_machine_that_is_killed_during_its_notice_permits_two_more() -> None:
    killed = machine(RECLAIMED, exit_code=None, noticed=True)
    assert check_machine_count(PLAN, [killed, machine(), *NEEDED], [], fits=1) == []
    assert check_machine_count(PLAN, [killed, machine(), machine(), *NEEDED], [], fits=1)


def test_every_fit_and_every_release_permits_machines() -> None:
    assert check_machine_count(PLAN, [*NEEDED, *NEEDED], [], fits=2) == []
    assert check_machine_count(PLAN, [machine(), *NEEDED], [RELEASED], fits=1) == []


def test_a_run_behind_a_firewall_must_end_with_the_remedy() -> None:
    plan = CloudChaosPlan(1, "aws_batch", machines=2, firewall="machines")
    remedy = unreachable_remedy(Unreachable.LEADER)
    assert check_refused_run(plan, DriverOutcome(error="ControllerError", text=remedy)) == []
    for outcome in (
        DriverOutcome(value="a result"),
        DriverOutcome(error="ControllerError", text="another reason"),
        DriverOutcome(error="TrainingFailedError", text=remedy),
    ):
        assert check_refused_run(plan, outcome)


def test_only_the_release_of_a_machine_of_a_round_is_unreported() -> None:
    agent = AgentId("a")
    node = NodeAssignment(
        agent=agent, node_rank=0, first_rank=0, num_workers=1, host="h", token=Token("t"), node=0
    )
    opened = RoundOpened(round=Round(number=1, assignments=(node,)))
    too_few = replace(RELEASED, reason="machines for 1 of at least 2 workers were granted")
    assert has_unreported_release([opened, too_few])
    assert not has_unreported_release([too_few])
    assert not has_unreported_release([opened, replace(RELEASED, reason="all are requested again")])
