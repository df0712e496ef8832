"""The user's backend hooks, in a process of their own: ordered one by one, never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from spotfit.agent.audience import Begin, Ear
from spotfit.core.codec import decoder, encode
from spotfit.host import log
from spotfit.model.audience import Hello
from spotfit.model.hooks import Ask, FromHooks, Hook, Over, Perform, Performed, Told
from spotfit.model.watch import Trouble
from spotfit.model.wire import Outcome

_frames: msgspec.json.Decoder[FromHooks] = decoder(FromHooks)  # type: ignore[arg-type]
PATIENCE_S = 30.0
"""How long a hook of an attempt that is over may go on before its process is ended."""


class LiveHooks:
    """`Hooks` in a process that is started when there is something to perform."""

    def __init__(
        self, hello: Hello, begin: Begin, later: Callable[[float, Callable[[], None]], object]
    ) -> None:
        self._hello = hello
        self._begin = begin
        self._later = later
        self._ear: Ear | None = None
        self._orders: deque[Perform] = deque()
        """Not performed yet; the first is under way."""
        self._asks: list[Ask] = []
        self._trouble: Trouble | None = None

    def perform(
        self, hook: Hook, round_number: int, world_size: int, resources: Mapping[str, float]
    ) -> None:
        order = Perform(hook, round_number, world_size, dict(resources))
        self._orders.append(order)
        self._tell(encode(order))

    def performed(self, hook: Hook, round_number: int) -> bool:
        return not any(one.hook == hook and one.round == round_number for one in self._orders)

    def asks(self) -> list[Ask]:
        asks, self._asks = self._asks, []
        return asks

    def answered(self, round_number: int, rank: int, outcome: Outcome) -> None:
        self._tell(encode(Told(round_number, rank, outcome.call, outcome.value, outcome.raised)))

    def over(self, round_number: int) -> None:
        if self._ear is not None:
            self._tell(encode(Over(round_number)))
            self._later(PATIENCE_S, lambda: self._end_if_stuck(round_number))

    def trouble(self) -> Trouble | None:
        return self._trouble

    @property
    def caught_up(self) -> bool:
        return self._trouble is not None or not self._orders

    def close(self) -> None:
        """End the process."""
        if self._ear is not None:
            ear, self._ear = self._ear, None
            ear.kill()

    def _tell(self, frame: bytes) -> None:
        if self._ear is None:
            self._ear = self._started()
        self._ear.send(frame)

    def _started(self) -> Ear:
        ear: Ear | None = None

        def ended(how: str, _clean: bool) -> None:  # noqa: FBT001 - as a child's end is told
            if ear is not None and ear is self._ear:
                why = "the process of the backend's hooks died"
                self._trouble = self._trouble or Trouble(why, f"The process of the hooks {how}.")

        ear = self._begin(self._hear, ended)
        ear.send(encode(self._hello))
        return ear

    def _hear(self, bodies: list[bytes]) -> None:
        for body in bodies:
            match _frames.decode(body):
                case Ask() as ask:
                    self._asks.append(ask)
                case Performed() as performed:
                    self._note(performed)

    def _note(self, performed: Performed) -> None:
        if self._orders:
            self._orders.popleft()
        if performed.trouble is not None and self._trouble is None:
            why = f"the backend's {performed.hook} raised"
            self._trouble = Trouble(why, performed.trouble, performed.pickle_key)

    def _end_if_stuck(self, round_number: int) -> None:
        """Its attempt is long over: nothing that comes after shall wait for it."""
        if self._ear is None or not self._orders or self._orders[0].round != round_number:
            return
        log.error("hook.stuck", hook=self._orders[0].hook, after_s=PATIENCE_S)
        self.close()
        left = [order for order in self._orders if order.round != round_number]
        self._orders = deque(left)
        for order in left:
            self._tell(encode(order))
