"""Memory in a simulated world holds what production would, for as long as it would."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from spotfit.core.errors import IntegrityError
from spotfit.model.holding import Part, State
from spotfit.model.wire import Start
from spotfit_localsim.saves import Kept, Memory, fill, remembered, what_is_in
from tests.unit.agent.dues import due
from tests.unit.worker.agent_end import start

KEPT = Kept(9, "link")


class Ground:
    """Everything comes when it is called for."""

    def __init__(self) -> None:
        self.cut = False
        self.due: list[Callable[[], None]] = []

    def now(self) -> float:
        return 0.0

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        self.due.append(then)

    def copy_s(self) -> float:
        return 1.0

    def reaches(self, sender: str, receiver: str) -> bool:
        return not self.cut

    def come(self) -> None:
        due, self.due = self.due, []
        for then in due:
            then()


@pytest.fixture
def ground() -> Ground:
    return Ground()


@pytest.fixture
def others(ground: Ground) -> Iterator[dict[str, Memory]]:
    others: dict[str, Memory] = {}
    for name in ("a", "b"):
        Memory(name, ground, others)
    yield others
    for memory in list(others.values()):
        memory.close()


def of_rank(rank: int, **given: object) -> Start:
    return start(round=3, rank=rank, world_size=2, **given)


def saved(memory: Memory, rank: int, kept: Kept = KEPT) -> None:
    """By a worker of that machine, and sent to the other."""
    segment = memory.segment(f"3-{rank}-{kept.step}")
    fill(segment, of_rank(rank), kept)
    assert memory.snapshots.copy is not None
    to = "b" if memory.name == "a" else "a"
    memory.snapshots.copy(due(segment.path, to, report=kept.step))


def held(memory: Memory, step: int = 9) -> list[int]:
    return [part.rank for part in memory.snapshots.held() if part.state.step == step]


def test_a_copy_lies_with_the_other_machine(ground: Ground, others: dict[str, Memory]) -> None:
    saved(others["a"], 0)
    assert (held(others["a"]), held(others["b"])) == ([0], [])
    ground.come()
    assert held(others["b"]) == [0]


def test_a_copy_does_not_come_that_way(ground: Ground, others: dict[str, Memory]) -> None:
    saved(others["a"], 0)
    ground.cut = True
    ground.come()
    assert held(others["b"]) == []
    ground.cut = False
    saved(others["a"], 0, Kept(12, "link"))
    others["a"].close()
    ground.come()
    assert held(others["b"], 12) == []


def test_what_lies_here_and_there_comes_together(ground: Ground, others: dict[str, Memory]) -> None:
    saved(others["a"], 0)
    saved(others["b"], 1)
    for memory in others.values():
        memory.snapshots.held()
    path = others["a"].snapshots.find(Part(State(3, 9), 0, 2))
    begins = replace(
        of_rank(0), memory=State(3, 9), remembered=(str(path), ""), elsewhere=("", "b")
    )
    whole = remembered(begins, others["a"], others, lambda _: True)
    assert what_is_in(whole) == KEPT
    with pytest.raises(IntegrityError, match="finds nothing of rank 1"):
        remembered(begins, others["a"], others, lambda _: False)
