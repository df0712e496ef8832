"""Cached views: written at intervals, optional for readers."""

import pytest
from msgspec.structs import replace

from spotfit.core.errors import AlreadyExistsError, TransientStoreError
from spotfit.ledger import journal, keys
from spotfit.ledger.journal import CachedView
from spotfit.model.events import FailureCause, RoundClosed
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import (
    TOKEN,
    a_committed_checkpoint,
    a_group,
    a_notice,
    a_round,
    a_view,
    an_agent_id,
)

RICH = a_view(
    next_slot=journal.VIEW_CACHE_INTERVAL,
    round=a_round(2),
    last_round_closed=RoundClosed(round_number=1, cause=FailureCause.WORKER, reason="why"),
    failure_counts={FailureCause.WORKER: 1},
    notices={an_agent_id(1): a_notice()},
    notice_slots={an_agent_id(1): 9},
    lost_agents=frozenset({an_agent_id(2)}),
    checkpoints=(a_committed_checkpoint(metrics={"nested": {"loss": [1.5, None, "x"]}}),),
    dropped_checkpoints=("c0",),
    groups={TOKEN: a_group(lost_agent_by_restarted_node={1: an_agent_id(1)})},
)
CACHED = CachedView(view=RICH, previous="1" * 64)


@pytest.mark.parametrize(
    ("slot", "due"),
    [
        (0, False),
        (1, False),
        (journal.VIEW_CACHE_INTERVAL - 1, False),
        (journal.VIEW_CACHE_INTERVAL, True),
        (512, True),
    ],
)
def test_a_cached_view_is_due_every_interval(slot: int, due: bool) -> None:
    assert journal.is_cache_due(a_view(next_slot=slot)) == due


def test_a_cached_view_round_trips() -> None:
    store = MemoryStore()
    journal.write_cached_view(store, CACHED)
    assert journal.read_newest_view(store) == CACHED


def test_the_newest_decodable_view_is_read() -> None:
    store = MemoryStore()
    newer = CachedView(
        view=replace(RICH, next_slot=2 * journal.VIEW_CACHE_INTERVAL), previous="2" * 64
    )
    journal.write_cached_view(store, CACHED)
    journal.write_cached_view(store, newer)
    assert journal.read_newest_view(store) == newer
    store.put(keys.cached_view(newer.view.next_slot), b'{"view": {"next_slot": "\xff')
    assert journal.read_newest_view(store) == CACHED


def test_without_a_cached_view_there_is_none_to_start_from() -> None:
    assert journal.read_newest_view(MemoryStore()) is None


@pytest.mark.parametrize("error", [AlreadyExistsError("there"), TransientStoreError("no answer")])
def test_a_failed_write_is_ignored(error: Exception) -> None:
    class Refusing(MemoryStore):
        def create(self, key: str, body: bytes) -> None:
            raise error

    store = Refusing()
    journal.write_cached_view(store, CACHED)
    assert list(store.list()) == []
