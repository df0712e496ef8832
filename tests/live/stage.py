"""A node's process layer without an agent: a real crew, and a hub that only gathers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from spotfit.agent.crew import LiveCrew
from spotfit.agent.logs import LogShipper
from spotfit.agent.loop import Loop
from spotfit.agent.ports import Exited, Said
from spotfit.agent.zygote import ZygoteKeeper
from spotfit.core.codec import decoder, encode
from spotfit.core.ids import AgentId, RunId
from spotfit.host.clocks import SystemClock, wall_ms
from spotfit.model.spec import RunSpec
from spotfit.model.wire import (
    FromWorker,
    Gather,
    Gathered,
    Raised,
    Returned,
    Running,
    Start,
)
from spotfit.ship.environment import RuntimeEnv
from spotfit.ship.luggage import pack
from spotfit.ship.sign import RunKey
from spotfit.store.opening import open_store

RUN = RunId("r" * 32)
KEY = RunKey(bytes(range(32)), RUN)
SECRET = KEY.to_text()
ME = AgentId("a-1")
_frames: msgspec.json.Decoder[FromWorker] = decoder(FromWorker)  # type: ignore[arg-type]


class Stage:
    """Starts rounds of real workers and lets them meet."""

    def __init__(self, folder: Path, keeper: ZygoteKeeper, *, slots: int = 4) -> None:
        self.folder = folder
        (folder / "bucket").mkdir(parents=True, exist_ok=True)
        (folder / "scratch").mkdir(exist_ok=True)
        self.clock = SystemClock()
        self.loop = Loop(self.clock)
        self.store = open_store(str(folder / "bucket"))
        self.logs = LogShipper(self.store, ME, wall_ms=wall_ms, clock=self.clock, pause_s=0.05)
        self.crew = LiveCrew(
            self.loop,
            keeper,
            store=self.store,
            key=KEY,
            logs=self.logs,
            scratch=str(folder / "scratch"),
            slots=slots,
        )
        self.spec: RunSpec | None = None
        self.said: list[tuple[int, FromWorker]] = []
        self.exits: dict[int, str] = {}
        self._gathers: dict[tuple[str, int], dict[int, bytes]] = {}
        self._world = 0

    def pack(
        self,
        fn: Callable[..., Any],
        *,
        framework: str = "torch",
        env_vars: dict[str, str] | None = None,
        objects: dict[str, Any] | None = None,
    ) -> None:
        """The run is known."""
        luggage = pack(
            fn,
            None,
            runtime_env=RuntimeEnv(env_vars=env_vars or {}),
            key=KEY,
            store=self.store,
            objects=objects,
        )
        self.spec = RunSpec(
            RUN,
            "test",
            "fit",
            4,
            4,
            framework=framework,
            luggage=json.loads(encode(luggage)),
            storage_url=str(self.folder / "bucket"),
        )
        self.crew.prepare(self.spec)

    def start(self, round_number: int, workers: int) -> None:
        """Open a round on this node alone."""
        spec = self.spec
        assert spec is not None
        self.said, self.exits, self._gathers, self._world = [], {}, {}, workers
        self.crew.start(
            [
                Start(
                    run_id=spec.run_id,
                    run_name=spec.name,
                    round=round_number,
                    rank=rank,
                    local_rank=rank,
                    world_size=workers,
                    local_world_size=workers,
                    node_rank=0,
                    host="127.0.0.1",
                    storage_url=spec.storage_url,
                    framework=spec.framework,
                    framework_options={},
                    luggage=spec.luggage,
                    scratch=str(self.folder / "scratch"),
                    secret=SECRET,
                    spec=msgspec.Raw(encode(spec)),
                )
                for rank in range(workers)
            ]
        )

    def until(self, done: Callable[[], bool], *, within_s: float = 30.0) -> float:
        """Let things happen until `done`; the seconds it took."""
        began = self.clock.now()
        while not done():
            assert self.clock.now() - began < within_s, (self.said, self.exits)
            self.loop.turn(0.5)
            self._take()
        return self.clock.now() - began

    def told(self, kind: type[FromWorker]) -> dict[int, Any]:
        """By rank, the last frame of that kind."""
        return {rank: frame for rank, frame in self.said if isinstance(frame, kind)}

    def all_running(self) -> bool:
        return len(self.told(Running)) == self._world

    def all_gone(self) -> bool:
        return not self.crew.busy and len(self.exits) == self._world

    def all_done(self) -> bool:
        return len(self.told(Returned)) + len(self.told(Raised)) == self._world

    def lines(self) -> list[dict[str, Any]]:
        """Close the log, and read it."""
        self.logs.close()
        chunks = [self.store.get(info.key) for info in self.store.list(".spotfit/logs")]
        return [json.loads(line) for chunk in chunks for line in chunk.splitlines()]

    def close(self) -> None:
        self.crew.close()
        self.until(lambda: self.crew.left == 0)
        self.crew.detach()
        self.logs.close()
        self.loop.close()

    def _take(self) -> None:
        for event in self.crew.events():
            match event:
                case Said(rank=rank, frames=frames):
                    for raw in frames:
                        self._hear(rank, _frames.decode(raw))
                case Exited(rank=rank, how=how):
                    self.exits[rank] = how

    def _hear(self, rank: int, frame: FromWorker) -> None:
        self.said.append((rank, frame))
        if isinstance(frame, Gather):
            here = self._gathers.setdefault((frame.kind, frame.seq), {})
            here[rank] = frame.value
            if len(here) == self._world:
                for each in here:
                    self.crew.send(each, Gathered(frame.kind, frame.seq, here[0]))
