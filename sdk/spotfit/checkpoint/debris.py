"""Checkpoints that were begun and never committed, in rounds that are over: found, and deleted.

When the hub gives a checkpoint its name, the leader leaves a note where its manifests will lie:
else nobody could tell what a dying worker left from what users keep in the run's folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from spotfit.checkpoint.drop import Delete, delete_all
from spotfit.checkpoint.manifest import manifests_of
from spotfit.ledger import keys
from spotfit.store.api import Store

PATIENCE_ROUNDS = 3


class _Begun(NamedTuple):
    """A name under which something was or is written."""

    last_round: int = 0
    """The last round in which it was given, or written to."""
    kinds: frozenset[str] = frozenset()
    """What tells of it: manifests, and notes."""

    @property
    def made(self) -> bool:
        """Whether only the hub ever gave it: then nobody will use it again."""
        return "made" in self.kinds and "chosen" not in self.kinds

    @property
    def noted(self) -> bool:
        """Whether somebody was to upload files of ours to its folder."""
        return not self.kinds.isdisjoint({"made", "chosen"})


def note(store: Store, name: str, round_number: int, *, made: bool) -> None:
    """Leave word that this name was given in that round, for files that we upload."""
    store.put(keys.begun(name, round_number, made=made), b"")


def begun_among(listed: Iterable[str]) -> frozenset[str]:
    """All names that anything among the manifests tells of, by its keys.

    What is being deleted is among them until it is gone.
    """
    return frozenset(trace.name for trace in map(keys.read_trace, listed) if trace is not None)


def undeleted(store: Store, dropped: Collection[str]) -> tuple[str, ...]:
    """Of checkpoints that were dropped, those of which something is left."""
    listed = (one.key for one in store.list(keys.MANIFESTS.rstrip("/")))
    return tuple(sorted(begun_among(listed).intersection(dropped)))


def abandoned(
    store: Store, *, kept: Collection[str], before: int, dropped: Collection[str] = ()
) -> tuple[str, ...]:
    """Names that are not `kept`, and were used in rounds before that one only.

    What a user gave a name stays for `PATIENCE_ROUNDS` more, unless it was `dropped`: it may be all
    that is left of that step, and he knows where to look for it.
    """

    def patience(name: str, begun: _Begun) -> int:
        return 0 if begun.made or name in dropped else PATIENCE_ROUNDS

    return tuple(
        name
        for name, begun in _begun_in(store).items()
        if name not in kept and begun.last_round < before - patience(name, begun)
    )


def discard(store: Store, name: str, *, delete: Delete | None = None) -> None:
    """Delete what we uploaded under that name, and then what tells of it, as `drop` does.

    What users wrote to a folder by themselves stays theirs. May be called again, by a successor
    too, and for a name already gone.
    """
    parts = manifests_of(store, name)
    begun = _begun_in(store, name).get(name, _Begun())
    ours = begun.noted or any(not part.at for part in parts)
    is_ours = ours and not any(part.at == name for part in parts)
    delete_all(store, name, parts, {name} if is_ours else (), delete or store.delete)


def _begun_in(store: Store, name: str = "") -> dict[str, _Begun]:
    """What lies among the manifests, of one name or of all."""
    found: dict[str, _Begun] = {}
    for info in store.list(f"{keys.MANIFESTS}{name}".rstrip("/")):
        trace = keys.read_trace(info.key)
        if trace is not None:
            known = found.get(trace.name, _Begun())
            last = max(known.last_round, trace.round)
            found[trace.name] = _Begun(last, known.kinds | {trace.kind})
    return found
