"""Which of the saved states a group goes on from: the newest that all of its ranks can read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from spotfit.checkpoint.relay import LANE, Company, lane, needs_of, read_together
from spotfit.checkpoint.saved import Opened, Order, Saved, read_alone, told
from spotfit.core.clock import Clock
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.host import log
from spotfit.worker.context import TrainContext
from spotfit.worker.handover import IN_MEMORY, Handover

Gather = Callable[[Any], list[Any]]
"""Every rank gives something, and gets what all gave."""

Broadcast = Callable[[Any], Any]
"""Every rank gives something, and gets what rank 0 gave."""


class Planned(NamedTuple):
    """What this rank makes of a state."""

    orders: Sequence[Order]
    """What it has to read."""
    fit: Any = None
    """How far the state fits: all ranks are told before any of them reads."""


Plan = Callable[[Saved], Planned]
"""Touches nothing. Raises `IntegrityError`, and `ConfigError` for a state that does not fit."""

Judge = Callable[[Sequence[Any]], None]
"""Is given what all ranks have told of how it fits. Raises `ConfigError`, on all ranks or none."""


class _Offer(NamedTuple):
    """A state that rank 0 has found, for all."""

    name: str
    opened: Opened | None
    broken: str = ""
    """Why it could not be opened."""


class _Told(NamedTuple):
    """What each rank tells all others of a state that might be gone on from."""

    broken: str | None
    unfit: ConfigError | None
    fit: Any
    node: int
    needs: int
    """The chunks it has to fetch: bit n for number n."""
    lane: Path | None
    """Through which the ranks of its machine may have what it has fetched."""


class Recall:
    """All ranks look at the same states, and agree on each. Those of a machine read together."""

    def __init__(
        self,
        desk: Handover,
        context: TrainContext,
        *,
        gather: Gather,
        broadcast: Broadcast,
        clock: Clock,
    ) -> None:
        self._desk = desk
        self._node = context.get_node_rank()
        self._rank = context.get_world_rank()
        self._fellows = context.get_local_world_size()
        self._gather = gather
        self._broadcast = broadcast
        self._clock = clock

    def newest(
        self, plan: Plan, judge: Judge = lambda _: None, *, saved_since: bool = False
    ) -> Saved | None:
        """The newest state of which every rank has read what it planned; None if there is none.

        That is what the round began from; if it has `saved_since`, the latest checkpoint. One that
        is damaged is told of, and an earlier one taken. Raises `IntegrityError` where no checkpoint
        is left that can be read, and on all ranks `ConfigError` where a state does not fit one of
        them, or `judge` says so: then nothing of it was read.
        """
        if saved_since:
            self._gather(None)  # whoever saves without an agent has brought its part by then
        offers = self._offers(saved_since=saved_since) if self._rank == 0 else iter(())
        saved, found_any = None, False
        # Not gathered: everybody's would be made as big as rank 0's, which holds all indices.
        while saved is None and (offer := self._broadcast(next(offers, None))) is not None:
            found_any = found_any or offer.name != IN_MEMORY
            saved = self._read(offer, plan, judge)
        if saved is None and found_any:
            raise IntegrityError(
                "No checkpoint of this run can be read any more.",
                do="Look at the log for what is broken, restore it from a copy, or name a new run.",
            )
        return saved

    def _offers(self, *, saved_since: bool) -> Iterator[_Offer]:
        """What a Checkpointer has saved, the newest first: one rank looks for all."""
        if not saved_since:
            yield from _offered(IN_MEMORY, self._desk.open_memory)
        for name in self._desk.committed() if saved_since else self._begun_from():
            yield from _offered(name, partial(self._desk.open, name))

    def _begun_from(self) -> Iterator[str]:
        if self._desk.begun_from is not None:
            yield self._desk.begun_from
            yield from self._desk.earlier()

    def _accepted(self, offer: _Offer) -> Saved:
        if offer.opened is None:
            raise IntegrityError(offer.broken)
        return self._desk.reopen(offer.opened)

    def _read(self, offer: _Offer, plan: Plan, judge: Judge) -> Saved | None:
        """That state, if every rank could read it; what is broken is told of."""
        saved, (orders, fit), broken, unfit = _planned(partial(self._accepted, offer), plan)
        with self._lane(orders) as lane:
            told = _Told(broken, unfit, fit, self._node, needs_of(orders), lane)
            all_told = self._gather(told)
            trouble = _first(one.broken for one in all_told)
            if trouble is None:
                _refuse(unfit, all_told)
                judge([one.fit for one in all_told])
                trouble = _first(self._gather(self._fetched(orders, all_told)))
        if trouble is None:
            return saved
        log.error("checkpoint.broken", name=offer.name, why=trouble, instead="an earlier one")
        if offer.name != IN_MEMORY:
            self._desk.mistrust(offer.name)
        return None

    @contextmanager
    def _lane(self, orders: Sequence[Order]) -> Iterator[Path | None]:
        """Through which the others of this machine may have what this rank fetches."""
        if self._fellows == 1 or not needs_of(orders):
            yield None
            return
        path = self._desk.path_for(self._desk.folders[0]).with_suffix(LANE)
        biggest_bytes = max(order.chunk.size_bytes for order in orders)
        with lane(
            path, fellows=self._fellows, chunks=len(orders), place_bytes=biggest_bytes
        ) as there:
            yield path if there else None

    def _fetched(self, orders: Sequence[Order], all_told: Sequence[_Told]) -> str | None:
        """None once all is read, else what is broken."""
        company = self._company(all_told)
        try:
            if company is None:
                read_alone(orders)
            else:
                read_together(orders, company, self._clock)
        except IntegrityError as broken:
            return str(broken)
        return None

    def _company(self, all_told: Sequence[_Told]) -> Company | None:
        """Those of this machine who have to fetch anything; None where this rank does so alone."""
        fellows = [
            rank for rank, one in enumerate(all_told) if one.node == self._node and one.needs
        ]
        lanes = [lane for rank in fellows if (lane := all_told[rank].lane) is not None]
        if self._rank not in fellows or len(fellows) == 1 or len(lanes) < len(fellows):
            return None
        return Company(fellows.index(self._rank), lanes, [all_told[rank].needs for rank in fellows])


def _offered(name: str, opener: Callable[[], Saved | None]) -> Iterator[_Offer]:
    """One, unless no Checkpointer has saved it."""
    try:
        saved = opener()
    except IntegrityError as broken:
        yield _Offer(name, None, str(broken))
    else:
        if saved is not None:
            yield _Offer(name, told(saved))


def _planned(
    opener: Callable[[], Saved], plan: Plan
) -> tuple[Saved | None, Planned, str | None, ConfigError | None]:
    """With why it is broken, or does not fit: the other ranks wait to be told."""
    try:
        saved = opener()
        return saved, plan(saved), None, None
    except IntegrityError as broken:
        return None, Planned(()), str(broken), None
    except ConfigError as unfit:
        return None, Planned(()), None, unfit


def _refuse(mine: ConfigError | None, all_told: Iterable[_Told]) -> None:
    """Each rank with its own words, if it has any."""
    for unfit in (mine, *(one.unfit for one in all_told)):
        if unfit is not None:
            raise unfit


def _first(troubles: Iterable[str | None]) -> str | None:
    return next(filter(None, troubles), None)
