"""Parcels that workers gave away: brought by a process that may die, and told once."""

from __future__ import annotations

from collections.abc import Callable

from spotfit.agent.carrier import LiveCarrier, Order
from spotfit.core.codec import decoder, encode
from spotfit.model.carrier import Brought, Lost, Take
from spotfit.model.wire import Carry

_takes = decoder(Take)


class Life:
    """One process, which does what the test says."""

    def __init__(
        self, hear: Callable[[list[bytes]], None], end: Callable[[str, bool], None]
    ) -> None:
        self.hear, self.end = hear, end
        self.orders: list[Take] = []
        self.killed = False

    def send(self, body: bytes) -> None:
        self.orders.append(_takes.decode(body))

    def kill(self) -> None:
        self.killed = True

    def says(self, message: Brought | Lost) -> None:
        self.hear([encode(message)])


class House:
    def __init__(self) -> None:
        self.lives: list[Life] = []
        self.told: list[tuple[str, Brought | Lost]] = []
        self.carrier = LiveCarrier("memory://run", self._begin, self._tell)

    def take(self, name: str, *, round_: int = 3, rank: int = 0) -> None:
        self.carrier.take(Order(round_, rank, Carry(0, name, name.encode())))

    def _begin(self, hear: Callable[[list[bytes]], None], end: Callable[[str, bool], None]) -> Life:
        self.lives.append(Life(hear, end))
        return self.lives[-1]

    def _tell(self, order: Order, how: Brought | Lost) -> None:
        self.told.append((order.carry.name, how))


def test_a_process_is_begun_with_the_first_parcel() -> None:
    house = House()
    assert house.carrier.round is None
    assert house.lives == []
    house.take("a", rank=1)
    house.take("b")
    (life,) = house.lives
    assert life.orders == [Take(1, 1, "memory://run", b"a"), Take(2, 0, "memory://run", b"b")]
    assert house.carrier.round == 3


def test_each_end_is_told_once_and_then_nothing_is_carried() -> None:
    house = House()
    house.take("a")
    house.take("b")
    house.lives[0].says(Lost(2, "no"))
    house.lives[0].says(Brought(1, 10))
    house.lives[0].says(Brought(1, 10))
    assert house.told == [("b", Lost(2, "no")), ("a", Brought(1, 10))]
    assert house.carrier.round is None


def test_what_a_dead_process_had_not_brought_is_begun_again() -> None:
    house = House()
    house.take("a")
    house.take("b")
    house.lives[0].says(Brought(1, 10))
    house.lives[0].end("was killed by SIGKILL", False)
    assert [one.parcel for one in house.lives[1].orders] == [b"b"]
    house.lives[1].says(Brought(2, 10))
    house.lives[1].end("was killed by SIGKILL", False)
    assert len(house.lives) == 2, "there is nothing left to bring"
    house.take("c")
    assert [one.parcel for one in house.lives[2].orders] == [b"c"]


def test_processes_that_die_over_the_same_parcel_are_not_made_for_ever() -> None:
    house = House()
    house.take("a")
    for n in range(3):
        house.lives[n].end("was killed by SIGSEGV", False)
    assert len(house.lives) == 3
    ((name, lost),) = house.told
    assert name == "a"
    assert isinstance(lost, Lost)
    assert "was killed by SIGSEGV" in lost.told


def test_what_is_given_up_is_neither_brought_nor_told() -> None:
    house = House()
    house.take("a")
    house.carrier.give_up()
    assert house.lives[0].killed
    assert house.carrier.round is None
    house.take("b", round_=4)
    house.lives[0].says(Brought(1, 10))
    house.lives[0].end("was killed by SIGKILL", False)
    assert (house.told, len(house.lives)) == ([], 2), "the dead one speaks for nobody"
    house.lives[1].says(Brought(2, 5))
    assert house.told == [("b", Brought(2, 5))]


def test_who_carries_nothing_gives_nothing_up() -> None:
    house = House()
    house.take("a")
    house.lives[0].says(Brought(1, 10))
    house.carrier.give_up()
    assert not house.lives[0].killed, "the next parcel finds it there"
