"""Helpers for tests with several transports in one event loop."""

from collections.abc import Callable

from spotfit.agent.ports import TransportEvent
from spotfit.agent.tls_transport import TlsTransport
from spotfit.core.ids import AgentId, RunId, Token
from spotfit.host.event_loop import EventLoop
from spotfit.host.system import SystemClock
from spotfit.model.topology import Member
from spotfit.protocol.agent_leader import Join
from spotfit.security.run_key import RunKey

RUN = RunId("r" * 32)
SECRET = RunKey(b"s" * 32, RUN).to_text()
OTHER_SECRET = RunKey(b"o" * 32, RUN).to_text()


class SkippableClock(SystemClock):
    """The system clock with an offset that tests can increase."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def now(self) -> float:
        return super().now() + self.skipped_s


def make_join(name: str, *, run: str = RUN) -> Join:
    return Join(
        run_id=run,
        member=Member(
            agent=AgentId(name),
            host="127.0.0.1",
            coordinator_address="",
            slots=1,
            token=Token("t"),
            node=0,
        ),
        next_slot=0,
    )


def make_net(loop: EventLoop, *, secret: str = SECRET) -> TlsTransport:
    return TlsTransport(loop, secret=secret, run_id=RUN, host="127.0.0.1")


def wait_for_events(loop: EventLoop, net: TlsTransport, count: int = 1) -> list[TransportEvent]:
    """Run the loop until at least `count` events have arrived, and return them."""
    events: list[TransportEvent] = []
    run_loop_until(loop, lambda: len(events.__iadd__(net.drain_events())) >= count)
    return events


def run_loop_until(loop: EventLoop, done: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if done():
            return
        loop.run_once(1)
    raise AssertionError("the condition was not met")
