"""Snapshots: a cache that loses nothing, and that nobody depends on."""

import pytest
from msgspec.structs import replace

from spotfit.core.errors import AlreadyExistsError, TransientStoreError
from spotfit.ledger import keys, snapshot
from spotfit.model.events import Blame, RoundClosed
from spotfit.model.view import View
from spotfit.store.memory import MemoryStore
from spotfit.testing.builders import a_commit, a_notice, a_round, a_view, an_agent

RICH = a_view(
    next_slot=snapshot.EVERY,
    round=a_round(2),
    last_closed=RoundClosed(1, Blame.WORKER, "why"),
    failures={Blame.WORKER: 1},
    notices={an_agent(1): a_notice()},
    noticed_slots={an_agent(1): 9},
    lost_agents=frozenset({an_agent(2)}),
    checkpoints=(a_commit(metrics={"nested": {"loss": [1.5, None, "x"]}}),),
    dropped=("c0",),
)


@pytest.mark.parametrize(
    ("slot", "due"),
    [(0, False), (1, False), (snapshot.EVERY - 1, False), (snapshot.EVERY, True), (512, True)],
)
def test_one_is_due_every_so_many_entries(slot: int, due: bool) -> None:
    assert snapshot.due(View(next_slot=slot)) == due


def test_what_is_read_is_what_was_written() -> None:
    store = MemoryStore()
    snapshot.write(store, RICH)
    assert snapshot.newest(store) == RICH


def test_the_newest_wins_and_an_unreadable_one_is_passed_over() -> None:
    store = MemoryStore()
    newer = replace(RICH, next_slot=2 * snapshot.EVERY)
    snapshot.write(store, RICH)
    snapshot.write(store, newer)
    assert snapshot.newest(store) == newer
    store.put(keys.snapshot(newer.next_slot), b'{"view": {"next_slot": "\xff')
    assert snapshot.newest(store) == RICH


def test_without_one_there_is_the_empty_view() -> None:
    assert snapshot.newest(MemoryStore()) == View()


@pytest.mark.parametrize("trouble", [AlreadyExistsError("there"), TransientStoreError("no answer")])
def test_nothing_is_lost_where_one_cannot_be_written(trouble: Exception) -> None:
    class Refusing(MemoryStore):
        def create(self, key: str, body: bytes) -> None:
            raise trouble

    store = Refusing()
    snapshot.write(store, RICH)
    assert list(store.list()) == []
