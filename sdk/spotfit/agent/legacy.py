"""What rounds that are over leave to the next: checkpoints nobody committed, files to share."""

from __future__ import annotations

from collections.abc import Collection, Set
from functools import partial

from spotfit.agent.hub import Hub
from spotfit.checkpoint.debris import begun_among
from spotfit.checkpoint.manifest import ready_among
from spotfit.checkpoint.restore import check_present
from spotfit.control.errands import Errands, Insistent
from spotfit.core.errors import IntegrityError
from spotfit.host import log
from spotfit.ledger import keys
from spotfit.ledger.run import Ledger
from spotfit.model.view import View
from spotfit.model.watch import Ready
from spotfit.store.api import Store


class Legacy:
    """One term's. It is soft: a successor searches the bucket, and shares no older files."""

    def __init__(self, ledger: Ledger, errands: Errands) -> None:
        self._ledger = ledger
        self._errands = Insistent(errands)
        self._adopted: tuple[Ready, ...] = ()
        self.bases: set[str] = set()
        """What uploads that outlive the last round share files with."""
        self._begun: Set[str] = frozenset()
        """Names under which rounds before may have left something, or leave it yet."""
        self._given_up: set[str] = set()
        """Checkpoints that lack files, whatever is found of them later."""
        self._damaged: set[str] = set()
        """Checkpoints that ranks of earlier rounds could not read."""
        self._first_round: int | None = None
        """Of those that this leader has opened."""

    def open(self, number: int) -> None:
        """A round begins, from what is committed."""
        self._adopted = ()
        if self._first_round is None:
            self._first_round = number

    def adopt(self, hub: Hub) -> None:
        """Its round was closed: what is complete is still to be committed."""
        self._adopted = tuple(hub.ready)

    def take(self, hub: Hub) -> None:
        """What the ranks of its round knew, and what they still upload."""
        self.bases = hub.bases
        self._begun = hub.chosen
        self._given_up |= hub.given_up
        self._damaged |= hub.damaged

    def committed(self, name: str) -> None:
        """The journal has it now."""
        self._adopted = tuple(one for one in self._adopted if one.name != name)

    def search(self, view: View, now: float) -> bool:
        """Look for complete checkpoints in the bucket that nobody committed; whether it is done."""
        known = {kept.name for kept in view.checkpoints} | set(view.dropped) | self._given_up
        after = view.last_round.number if view.last_round else 0
        name = f"survey {view.epoch}/{after}"  # an answer from an earlier term is an old one
        done = self._errands.run(name, partial(_look, self._ledger.store, known, view), now)
        if done is None:
            return False
        ready, begun = done.value
        self._adopted = tuple(sorted(ready, key=lambda one: (one.round, one.report)))
        self._begun |= begun
        return True

    def last_called(self, name: str) -> str | None:
        """The last of the checkpoints that users know by that name. '' where that is gone, or was
        never complete: somebody may still delete it, or upload it. None for a name that is new."""
        found = self._ledger.view.last_called(name)
        return "" if found is None and name in self._begun else found

    def uncommitted(self, view: View, hub: Hub | None) -> tuple[Ready, ...]:
        """All that is complete and continues what is committed."""
        complete = (*self._adopted, *(hub.ready if hub else ()))
        return tuple(found for found in complete if _is_news(view, found))

    def base(self, view: View, hub: Hub | None) -> str:
        """The latest snapshot that is committed, for the next one to share files with: it stays
        until there is another. '' where it is known to be damaged: whatever shares its files would
        be so, too.

        What an earlier leader knew of damage went with it, so none of its snapshots is shared:
        after a change of leaders the first one is uploaded in full.
        """
        damaged = self._damaged | (hub.damaged if hub else set())
        snapshots = [one for one in view.checkpoints if one.snapshot]
        if not snapshots or self._first_round is None or snapshots[-1].round < self._first_round:
            return ""
        return snapshots[-1].name if snapshots[-1].name not in damaged else ""


def _look(store: Store, known: Collection[str], view: View) -> tuple[list[Ready], frozenset[str]]:
    """What is complete, whole, news and not `known`, and all names that anything tells of."""
    listed = [one.key for one in store.list(keys.MANIFESTS.rstrip("/"))]
    complete = [one for one in ready_among(store, listed, known) if _is_news(view, one)]
    return [one for one in complete if _is_whole(store, one.name)], begun_among(listed)


def _is_whole(store: Store, name: str) -> bool:
    """Whether its files are there. Those that it shares may be gone: whose they were only the
    leader knew in whose term it was saved."""
    try:
        check_present(store, name)
    except IntegrityError as broken:
        log.warning("checkpoint.in_pieces", name=name, why=broken.what)
        return False
    return True


def _is_news(view: View, found: Ready) -> bool:
    """Whether it continues what is committed: saved later, and in the round that was the last.

    What an older round left uncommitted is debris of a history that nobody followed.
    """
    latest, last = view.latest_checkpoint, view.last_round
    if last is None or found.round != last.number:
        return False
    return latest is None or (found.round, found.report) > (latest.round, latest.report)
