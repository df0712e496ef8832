"""What the leader deletes: dropped checkpoints, and what rounds that are over left half done."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from spotfit.checkpoint.debris import abandoned, discard, note, undeleted
from spotfit.checkpoint.drop import drop
from spotfit.control.errands import Errands, Insistent
from spotfit.core.errors import StoreError, TransientStoreError
from spotfit.host import log
from spotfit.model.view import View
from spotfit.store.api import Store


class Tidying:
    """One deletion at a time, beside everything else; and a note for every name that is given.

    All of it is soft: a successor finds in the bucket what this leader did not finish. It stops
    when it `leads` no more.
    """

    def __init__(
        self, store: Store, errands: Errands, leads: Callable[[], bool] = lambda: True
    ) -> None:
        self._store = store
        self._leads = leads
        self._errands = Insistent(errands)
        self._doomed: dict[str, Callable[[], None]] = {}
        """By name, in order, how it is to be deleted."""
        self._deleting: str | None = None
        self._bases: set[str] = set()
        """What stays for those who share its files: the next fit deletes it, if this one ends."""
        self._search: tuple[str, Callable[[], tuple[str, ...]]] | None = None
        self._inherits = True
        """Whether nobody has looked yet for what was left by others."""
        self._notes: dict[str, Callable[[], None]] = {}

    @property
    def busy(self) -> bool:
        """Whether anything is left to delete, or to look for."""
        return not self._doomed.keys() <= self._bases or self._search is not None

    def drop(self, name: str) -> None:
        """The journal has dropped that checkpoint."""
        self._doomed[name] = partial(drop, self._store, name, delete=self._delete_one)

    def given(self, name: str, round_number: int, *, made: bool) -> None:
        """Somebody will upload files under that name: leave a note."""
        job = partial(note, self._store, name, round_number, made=made)
        self._notes[f"note {round_number} {name}"] = job

    def search(self, view: View, *, before: int) -> None:
        """Look for what rounds before that one have left behind."""
        kept = {one.name for one in view.checkpoints}
        dropped = view.dropped
        look = partial(abandoned, self._store, kept=kept, before=before, dropped=dropped)
        self._search = (f"debris {view.next_slot}", look)
        self._inherits = False

    def inherit(self, view: View) -> None:
        """Look for what former leaders dropped and have not deleted: no round follows, before which
        it would be looked for."""
        if self._inherits and view.dropped:
            self._search = (
                f"dropped {view.next_slot}",
                partial(undeleted, self._store, view.dropped),
            )
        self._inherits = False

    def go_on(
        self, view: View, saving: Collection[str], now: float, bases: Collection[str] = ()
    ) -> None:
        """Start what is due, and take in what has come. A name that is in use again stays.

        `bases` are deleted later: what is being saved shares their files.
        """
        self._bases = set(bases)
        for name, job in list(self._notes.items()):
            if self._errands.run(name, job, now) is not None:
                del self._notes[name]
        self._look(view, now)
        in_use = {one.name for one in view.checkpoints} | set(saving)
        for name in [one for one in self._doomed if one not in bases]:
            if self._deleting is None:
                self._begin(name, in_use)
        if self._deleting is not None:
            self._delete(self._deleting, now)

    def _look(self, view: View, now: float) -> None:
        if self._search is None:
            return
        name, look = self._search
        done = self._errands.run(name, look, now)
        if done is not None:
            self._search = None
            for found in done.value:
                how = drop if found in view.dropped else discard
                self._doomed.setdefault(
                    found, partial(how, self._store, found, delete=self._delete_one)
                )

    def _begin(self, name: str, in_use: Collection[str]) -> None:
        if name in in_use:
            del self._doomed[name]
        else:
            self._deleting = name

    def _delete(self, name: str, now: float) -> None:
        deletion = partial(_unless_refused, name, self._doomed[name])
        if self._errands.run(f"delete {name}", deletion, now) is not None:
            self._deleting = None
            del self._doomed[name]

    def _delete_one(self, key: str) -> None:
        if self._leads():
            self._store.delete(key)


def _unless_refused(name: str, deletion: Callable[[], None]) -> None:
    """Insist while the bucket is away, but not where it refuses: the run must end some day."""
    try:
        deletion()
    except TransientStoreError:
        raise
    except StoreError as refused:
        log.warning("checkpoint.undeleted", name=name, why=refused.what)
