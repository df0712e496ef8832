"""Nodes are taken away by plan: when, which, with or without a word, and what it leaves."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spotfit.agent.notices.file import FileNotice
from spotfit.core.codec import encode
from spotfit.ledger import keys
from spotfit.model.group import NodeState
from spotfit.store.memory import MemoryStore
from spotfit_localsim.dice import Dice
from spotfit_localsim.live.options import LocalOptions
from spotfit_localsim.live.places import Node
from spotfit_localsim.live.reclaimer import (
    Reclaimer,
    Reclamation,
    ReportedProgress,
    Strike,
    at_random,
    at_step,
    at_time,
    reclaiming,
)
from tests.unit.localsim.live.stand_in import Town, see_out


@dataclass
class Told:
    """A run that is as far as it is told."""

    at: int = 0

    def step(self) -> int:
        return self.at


@dataclass
class Market(Reclaimer):
    """Notes what it would do to two nodes."""

    standing: list[Node]
    did: list[tuple[str, int]] = field(default_factory=list)
    seconds_left: list[float] = field(default_factory=list)
    limits: list[int | None] = field(default_factory=list)

    def nodes(self) -> list[Node]:
        return self.standing

    def notify(self, node: Node, *, seconds_left: float, reason: str = "") -> None:
        self.did.append(("notify", node.number))
        self.seconds_left.append(seconds_left)

    def kill(self, node: Node, *, reason: str = "") -> None:
        self.did.append(("kill", node.number))

    def limit(self, nodes: int | None) -> None:
        self.limits.append(nodes)


def carried_out(town: Town, *plan: Strike) -> tuple[Reclamation, Market, Told]:
    group = town.root.group(town.launch.run_id, "a")  # type: ignore[arg-type]  # ids are text
    market, progress = Market([group.node(0), group.node(1)]), Told()
    stream = Dice(1).stream("nodes")
    return (
        Reclamation(market, progress, list(plan), stream, began=100.0, notice_s=10.0),
        market,
        progress,
    )


def waits(reclamation: Reclamation) -> bool:
    return not reclamation.over


def test_a_strike_comes_at_its_step(town: Town) -> None:
    reclamation, market, progress = carried_out(town, at_step(20, node=1), at_step(60, node=0))
    progress.at = 19
    reclamation.tick(100.0)
    assert market.did == []
    progress.at = 21
    reclamation.tick(100.1)
    assert market.did == [("kill", 1)]
    assert waits(reclamation)
    progress.at = 60
    reclamation.tick(100.2)
    assert not waits(reclamation)
    assert [(struck.node, struck.step, struck.announced) for struck in reclamation.done] == [
        (1, 21, False),
        (0, 60, False),
    ]


def test_a_strike_comes_at_its_time(town: Town) -> None:
    reclamation, market, _ = carried_out(town, at_time(5.0, node=0))
    reclamation.tick(104.9)
    assert market.did == []
    reclamation.tick(105.0)
    assert market.did == [("kill", 0)]


def test_who_was_told_is_killed_at_the_deadline(town: Town) -> None:
    reclamation, market, _ = carried_out(town, at_time(0.0, node=0, notice_s=8.0))
    reclamation.tick(100.0)
    assert market.did == [("notify", 0)]
    assert waits(reclamation)
    reclamation.tick(107.9)
    assert len(market.did) == 1
    reclamation.tick(108.0)
    assert market.did[1] == ("kill", 0)
    assert not waits(reclamation)


def test_a_strike_that_names_no_time_gives_the_notice_of_its_cloud(town: Town) -> None:
    reclamation, market, _ = carried_out(town, at_time(0.0, node=0, announced=True))
    reclamation.notice_s = 3.0
    reclamation.tick(100.0)
    assert (market.did, market.seconds_left) == ([("notify", 0)], [3.0])
    reclamation.tick(102.9)
    assert len(market.did) == 1
    reclamation.tick(103.0)
    assert market.did[1] == ("kill", 0)


def test_the_options_of_the_cloud_say_how_long_before(tmp_path: Path) -> None:
    options = LocalOptions(root=str(tmp_path / "root"), notice_s=7.0)
    with reclaiming(str(tmp_path / "runs" / "n"), [], options=options) as reclamation:
        assert reclamation.notice_s == 7.0


def test_during_a_drought_there_are_no_nodes(town: Town) -> None:
    reclamation, market, _ = carried_out(town, at_time(0.0, drought_s=3.0))
    reclamation.tick(100.0)
    assert market.limits == [0]
    assert waits(reclamation)
    reclamation.tick(103.0)
    assert market.limits == [0, None]
    assert not waits(reclamation)
    reclamation.lift()
    assert market.limits == [0, None]


def test_a_drought_ends_with_whoever_ordered_it(town: Town) -> None:
    reclamation, market, _ = carried_out(town, at_time(0.0, drought_s=3.0))
    reclamation.tick(100.0)
    reclamation.lift()
    assert market.limits == [0, None]


def test_a_strike_that_finds_nobody_waits(town: Town) -> None:
    reclamation, market, _ = carried_out(town, at_time(0.0))
    market.standing, standing = [], market.standing
    reclamation.tick(100.0)
    assert waits(reclamation)
    market.standing = standing
    reclamation.tick(101.0)
    assert len(market.did) == 1


def test_dice_choose_the_same_again() -> None:
    plan = at_random(7, per_minute=30.0, within_s=60.0)
    assert plan == at_random(7, per_minute=30.0, within_s=60.0)
    assert plan != at_random(8, per_minute=30.0, within_s=60.0)
    assert 10 < len(plan) < 60
    assert {strike.announced for strike in plan} == {True, False}
    assert {strike.notice_s for strike in plan} == {None}, "as the cloud's options say"
    silent = at_random(7, per_minute=9, within_s=60, announced=0, notice_s=4.0)
    assert not any(strike.announced for strike in silent)


def test_a_run_is_as_far_as_its_greatest_step() -> None:
    store = MemoryStore()
    progress = ReportedProgress(store)
    assert progress.step() == 0
    for n, steps in enumerate([[1, 2], [2, 3]]):
        lines = [json.dumps({"round": n, "n": 0, "metrics": {"step": step}}) for step in steps]
        store.put(keys.reports("a", n), "\n".join(lines).encode())  # type: ignore[arg-type]  # text
    assert ReportedProgress(store).step() == 3


def test_without_steps_reports_are_counted() -> None:
    store = MemoryStore()
    store.put(keys.reports("a", 0), encode({"metrics": {"loss": 1.0}}))  # type: ignore[arg-type]  # text
    assert ReportedProgress(store).step() == 1


def test_the_agent_reads_the_notice(town: Town) -> None:
    handle = town.submit("a", 4)
    up = town.next_up()
    reclaimer = Reclaimer(town.root, town.launch.run_id)
    (node,) = [node for node in reclaimer.nodes() if node.number == up.told["node"]]
    reclaimer.notify(node, seconds_left=12.0, reason="the price went up")
    source = FileNotice(lambda: None, Path(up.told["environment"]["SPOTFIT_NOTICE_FILE"]))
    notice = source.poll(0.0)
    assert notice is not None
    assert (notice.reason, notice.seconds_left) == ("the price went up", 12.0)
    assert node not in reclaimer.nodes()
    town.provisioner.cancel(handle)


def test_a_killed_node_is_gone_with_everything_and_says_why(town: Town) -> None:
    handle = town.submit("a", 2)
    up = town.next_up()
    reclaimer = Reclaimer(town.root)
    (node,) = reclaimer.nodes()
    reclaimer.kill(node, reason="the price went up")
    see_out(up.machine.pid)
    see_out(up.told["worker"])
    (status,) = town.observe(handle).nodes
    assert (status.state, status.reason) == (NodeState.GONE, "the price went up")
    assert reclaimer.nodes() == []
    reclaimer.kill(node)  # again: nothing happens


@pytest.mark.parametrize("run", ["other"])
def test_another_run_is_left_alone(town: Town, run: str) -> None:
    town.submit("a", 2)
    town.next_up()
    assert Reclaimer(town.root, run).nodes() == []  # type: ignore[arg-type]  # ids are text
    assert len(Reclaimer(town.root, town.launch.run_id).nodes()) == 1


def test_no_nodes_means_refusal(town: Town) -> None:
    Reclaimer(town.root).limit(0)
    with pytest.raises(AssertionError):
        town.submit("a", 2)
    Reclaimer(town.root).limit(None)
    town.submit("a", 2)
