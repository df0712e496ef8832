"""Victims are found by what they are, and nobody else is hurt."""

import subprocess
import sys
from pathlib import Path

from spotfit.core.ids import AgentId, RunId, Token
from spotfit.ledger.run import Ledger
from spotfit.model.events import LeaderElected
from spotfit.model.world import Member
from spotfit.store.opening import open_store
from spotfit_localsim.dice import Dice
from spotfit_localsim.live.victims import Victims, mourned, with_mark
from tests.unit.localsim.live.stand_in import Town, see_out

STREAM = Dice(1).stream("victims")


def victims(town: Town) -> Victims:
    return Victims(town.root, str(town.folder / "run"), "")


def test_there_may_be_nobody_to_kill(town: Town) -> None:
    for kind in ("worker", "zygote", "agent", "leader", "node"):
        assert victims(town).strike(kind, STREAM) is None


def test_an_agent_is_killed_alone(town: Town) -> None:
    town.submit("a", 2)
    up = town.next_up()
    assert victims(town).strike("agent", STREAM) == f"the agent {up.machine.pid}"
    see_out(up.machine.pid)


def test_a_node_is_killed_with_all_it_has(town: Town) -> None:
    town.submit("a", 2)
    up = town.next_up()
    struck = victims(town).strike("node", STREAM)
    assert struck is not None
    assert "a/0" in struck
    see_out(up.machine.pid)
    see_out(up.told["worker"])


def test_the_leader_is_who_the_journal_says(town: Town) -> None:
    town.submit("a", 4)
    ups = [town.next_up(), town.next_up()]
    ledger = Ledger(open_store(town.folder / "run"), RunId("run"), AgentId("agent"))
    ledger.append(LeaderElected(AgentId("agent"), 1), after=ledger.catch_up())
    leader = ups[1].machine.pid
    ledger.offer(Member(AgentId("agent"), "h", "h:1", 2, Token("a"), 1, pid=leader))
    assert victims(town).strike("leader", STREAM) == f"the leader {leader}"
    see_out(leader)
    assert ups[0].machine.alive


def test_who_has_the_mark_is_found_and_mourned() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"STORY": "of/seed/7"}
    ) as child:
        marked = with_mark("STORY", "of/seed/7")
        assert [one.partition(" ")[0] for one in marked] == [str(child.pid)]
        assert with_mark("STORY", "of/seed") == []
        mourned(marked)
        assert child.wait() != 0


def test_nobody_is_marked_by_a_name_alone(tmp_path: Path) -> None:
    assert with_mark("PATH", str(tmp_path)) == []
