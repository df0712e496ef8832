"""The process layer of a node without an agent: a real worker pool and a recording coordinator."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from spotfit.agent.log_shipper import LogShipper
from spotfit.agent.ports import WorkerExited, WorkerFramesReceived
from spotfit.agent.worker_pool import ProcessWorkerPool
from spotfit.code.code_bundle import upload_code_bundle
from spotfit.code.runtime_env import RuntimeEnv
from spotfit.core.codec import decoder, encode
from spotfit.core.ids import AgentId, RunId
from spotfit.fork_server.fork_client import ForkServerPool
from spotfit.host.event_loop import EventLoop
from spotfit.host.system import SystemClock, wall_ms
from spotfit.model.spec import RunSpec
from spotfit.protocol.worker_agent import (
    FromWorker,
    FunctionStarted,
    RankZeroBroadcast,
    RankZeroBroadcastResult,
    StartWorker,
)
from spotfit.security.run_key import RunKey
from spotfit.store.factory import open_store

RUN_ID = RunId("r" * 32)
KEY = RunKey(bytes(range(32)), RUN_ID)
SECRET = KEY.to_text()
AGENT_ID = AgentId("a-1")
_frames: msgspec.json.Decoder[FromWorker] = decoder(FromWorker)  # type: ignore[arg-type]


class WorkerPoolHarness:
    """A worker pool that starts rounds of real workers, and records their frames and exits."""

    def __init__(self, folder: Path, fork_servers: ForkServerPool, *, slots: int = 4) -> None:
        self.folder = folder
        (folder / "bucket").mkdir(parents=True, exist_ok=True)
        (folder / "scratch").mkdir(exist_ok=True)
        self.clock = SystemClock()
        self.loop = EventLoop(self.clock)
        self.store = open_store(str(folder / "bucket"))
        self.logs = LogShipper(
            self.store, AGENT_ID, wall_ms=wall_ms, clock=self.clock, flush_interval_s=0.05
        )
        self.worker_pool = ProcessWorkerPool(
            self.loop,
            fork_servers,
            store=self.store,
            key=KEY,
            logs=self.logs,
            scratch=str(folder / "scratch"),
            slots=slots,
        )
        self.spec: RunSpec | None = None
        self.frames: list[tuple[int, FromWorker]] = []
        self.exits: dict[int, str] = {}
        self._broadcasts: dict[tuple[str, int], dict[int, bytes]] = {}
        self._world_size = 0

    def pack(
        self,
        fn: Callable[..., Any],
        *,
        framework: str = "torch",
        env_vars: dict[str, str] | None = None,
        objects: dict[str, Any] | None = None,
    ) -> None:
        """Configure the run."""
        code_bundle = upload_code_bundle(
            fn,
            None,
            runtime_env=RuntimeEnv(env_vars=env_vars or {}),
            key=KEY,
            store=self.store,
            objects=objects,
        )
        self.spec = RunSpec(
            run_id=RUN_ID,
            name="test",
            fit_id="fit",
            min_workers=4,
            max_workers=4,
            framework=framework,
            code_bundle=json.loads(encode(code_bundle)),
            storage_url=str(self.folder / "bucket"),
        )
        self.worker_pool.prepare(self.spec)

    def start(self, round_number: int, workers: int) -> None:
        """Open a round on this node."""
        spec = self.spec
        assert spec is not None
        self.frames, self.exits, self._broadcasts, self._world_size = [], {}, {}, workers
        self.worker_pool.start(
            [
                StartWorker(
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
                    code_bundle=spec.code_bundle,
                    scratch_dir=str(self.folder / "scratch"),
                    secret=SECRET,
                    spec=msgspec.Raw(encode(spec)),
                )
                for rank in range(workers)
            ]
        )

    def until(self, condition: Callable[[], bool], *, within_s: float = 30.0) -> float:
        """Process events until the condition holds; return the duration in seconds."""
        started_at_s = self.clock.now()
        while not condition():
            assert self.clock.now() - started_at_s < within_s, (self.frames, self.exits)
            self.loop.run_once(0.5)
            self._drain_events()
        return self.clock.now() - started_at_s

    def last_frames(self, frame_type: type[FromWorker]) -> dict[int, Any]:
        """Return the last frame of this kind by rank."""
        return {rank: frame for rank, frame in self.frames if isinstance(frame, frame_type)}

    def has_all_running(self) -> bool:
        return len(self.last_frames(FunctionStarted)) == self._world_size

    def has_all_exited(self) -> bool:
        return not self.worker_pool.has_workers and len(self.exits) == self._world_size

    def lines(self) -> list[dict[str, Any]]:
        """Close the log and return its content."""
        self.logs.close()
        chunks = [self.store.get(info.key) for info in self.store.list(".spotfit/logs")]
        return [json.loads(line) for chunk in chunks for line in chunk.splitlines()]

    def close(self) -> None:
        self.worker_pool.close()
        self.until(lambda: self.worker_pool.live_process_count == 0)
        self.worker_pool.detach()
        self.logs.close()
        self.loop.close()

    def _drain_events(self) -> None:
        for event in self.worker_pool.drain_events():
            match event:
                case WorkerFramesReceived(rank=rank, frames=frames):
                    for raw in frames:
                        self._on_frame(rank, _frames.decode(raw))
                case WorkerExited(rank=rank, description=description):
                    self.exits[rank] = description

    def _on_frame(self, rank: int, frame: FromWorker) -> None:
        self.frames.append((rank, frame))
        if isinstance(frame, RankZeroBroadcast):
            values = self._broadcasts.setdefault((frame.kind, frame.seq), {})
            values[rank] = frame.value
            if len(values) == self._world_size:
                gathered = tuple(value for _, value in sorted(values.items()))
                result = RankZeroBroadcastResult(
                    kind=frame.kind,
                    seq=frame.seq,
                    value=values[0],
                    values=gathered if frame.all_values else (),
                )
                for each in values:
                    self.worker_pool.send(each, result)
