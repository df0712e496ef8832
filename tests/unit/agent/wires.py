"""Two or more nets in one loop, and strangers at their doors."""

from collections.abc import Callable

from spotfit.agent.loop import Loop
from spotfit.agent.net import TlsNet
from spotfit.agent.ports import NetEvent
from spotfit.core.ids import AgentId, RunId, Token
from spotfit.host.clocks import SystemClock
from spotfit.model.wire import Join
from spotfit.model.world import Member
from spotfit.ship.sign import RunKey

RUN = RunId("r" * 32)
SECRET = RunKey(b"s" * 32, RUN).to_text()
OTHER_SECRET = RunKey(b"o" * 32, RUN).to_text()


class Skipping(SystemClock):
    """The system's clock, but time may be skipped."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def now(self) -> float:
        return super().now() + self.skipped


def join_of(name: str, *, run: str = RUN) -> Join:
    return Join(run, Member(AgentId(name), "127.0.0.1", "", 1, Token("t"), 0), 0)


def net_in(loop: Loop, *, secret: str = SECRET) -> TlsNet:
    return TlsNet(loop, secret=secret, run_id=RUN, host="127.0.0.1")


def events_of(loop: Loop, net: TlsNet, count: int = 1) -> list[NetEvent]:
    """The next `count` events, or more."""
    came: list[NetEvent] = []
    turns_until(loop, lambda: len(came.__iadd__(net.events())) >= count)
    return came


def turns_until(loop: Loop, done: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if done():
            return
        loop.turn(1)
    raise AssertionError("it never came")
