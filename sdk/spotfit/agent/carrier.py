"""Uploads that outlive the workers who reported them: a process that takes their parcels over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from spotfit.agent.audience import Begin, Ear
from spotfit.core.codec import decoder, encode
from spotfit.host import log
from spotfit.model.carrier import Brought, FromCarrier, Lost, Take
from spotfit.model.wire import Carry

_says: msgspec.json.Decoder[FromCarrier] = decoder(FromCarrier)  # type: ignore[arg-type]
_CARRIERS = 3
"""So many processes may die over the same parcels before these are given up."""


class Order(NamedTuple):
    """A parcel of a worker of this node."""

    round: int
    rank: int
    carry: Carry
    is_snapshot: bool = False
    """Whether it is a snapshot: the training goes on without it, should it be lost."""


Ended = Callable[[Order, Brought | Lost], None]


class LiveCarrier:
    """Parcels in the care of a process that is started with the first, and again if it dies.

    It works for one round at a time. `ended` hears how each order ended, once.
    """

    def __init__(self, storage_url: str, begin: Begin, ended: Ended) -> None:
        self._storage_url = storage_url
        self._begin = begin
        self._ended = ended
        self._ear: Ear | None = None
        self._orders: dict[int, Order] = {}
        self._serial = 0
        self._lives = 0
        """Processes so far; only the last may speak for us."""
        self._deaths = 0
        """Of processes since the last parcel was brought."""

    @property
    def round(self) -> int | None:
        """The round whose parcels are not all brought; None while there are none."""
        return next((order.round for order in self._orders.values()), None)

    def take(self, order: Order) -> None:
        """Have it brought, after all others of that rank."""
        self._serial += 1
        self._orders[self._serial] = order
        self._send(self._serial, order)

    def give_up(self) -> None:
        """Bring nothing of what is under way: its files are about to be written anew."""
        if self._orders:
            log.warning("carrier.gives_up", round=self.round, parcels=len(self._orders))
            self._orders.clear()
            self.close()

    def close(self) -> None:
        """End the process."""
        if self._ear is not None:
            self._ear.kill()
            self._ear = None

    def _send(self, serial: int, order: Order) -> None:
        if self._ear is None:
            self._lives += 1
            self._ear = self._begin(
                partial(self._hear, self._lives), partial(self._end, self._lives)
            )
        take = Take(serial, order.rank, self._storage_url, order.carry.parcel)
        self._ear.send(encode(take))

    def _hear(self, life: int, frames: list[bytes]) -> None:
        for frame in frames if life == self._lives else ():
            message = _says.decode(frame)
            order = self._orders.pop(message.serial, None)
            if order is not None:
                self._deaths = 0
                self._ended(order, message)

    def _end(self, life: int, how: str, _clean: bool) -> None:  # noqa: FBT001 - as a child's end is told
        """What it had not brought is begun again by another; an upload may be done twice."""
        if life != self._lives or self._ear is None:
            return  # we ended it ourselves
        self._ear = None
        self._deaths += 1
        log.warning("carrier.died", how=how, parcels=len(self._orders), deaths=self._deaths)
        if self._deaths < _CARRIERS:
            for serial, order in self._orders.items():
                self._send(serial, order)
        else:
            self._fail_all(f"The process that uploads checkpoints {how}.")

    def _fail_all(self, why: str) -> None:
        orders, self._orders = self._orders, {}
        for serial, order in orders.items():
            self._ended(order, Lost(serial, why))
