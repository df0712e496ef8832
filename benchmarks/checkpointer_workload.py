"""The training functions of `checkpointer.py`: save and restore half a gigabyte.

Variants are measured in the same loop of the same workers, in alternating order. spotfit is
imported only when needed: the same training runs in the environment of a peer.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

LAYERS = 43
WIDTH = 1024
"""43 layers of 1024 by 1024 floats: 172 MiB of weights, 516 MiB with Adam's state."""
PUT_CONCURRENCY, GET_CONCURRENCY = 4, 8
"""Concurrent requests per rank, equal to those of spotfit."""
WARM_UP_ROUNDS = 2
"""Discarded rounds: the first ones allocate memory."""


class BenchmarkModel:
    """Weights and Adam's state, and a step that changes all of them."""

    def __init__(
        self,
        prepare: Callable[[torch.nn.Module], Any],
        rank: int,
        layers: int,
        width: int = WIDTH,
        *,
        sharded: bool = False,
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        self._seed = rank if sharded else 0
        linear = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
        self.model = prepare(torch.nn.Sequential(*linear))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self._inputs = torch.rand(8, width)

    def initialize_optimizer(self) -> None:
        """Create Adam's state by a step, and fill it with random values."""
        self.step()
        torch.manual_seed(self._seed)  # distinct layers: chunks with equal bytes are uploaded once
        for average in self._averages:
            average.uniform_()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._inputs).square().mean().backward()
        self.optimizer.step()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors, or local shards, of this rank that are saved."""
        return [*map(_local_part, self.model.parameters()), *self._averages]

    @property
    def _averages(self) -> list[torch.Tensor]:
        known = [part for state in self.optimizer.state.values() for part in state.values()]
        return [_local_part(tensor) for tensor in known if tensor.dim() > 0]


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; other tensors unchanged."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def timed_together(work: Callable[[], object]) -> float:
    """Return the duration on all ranks, after a common start."""
    dist.barrier()
    began = time.perf_counter()
    work()
    return slowest_rank(time.perf_counter() - began)


def slowest_rank(seconds: float) -> float:
    """Return the duration of the slowest rank."""
    own = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return float(own)


def alternating(sides: Sequence[str], pairs: int) -> Iterator[tuple[int, str]]:
    """Yield the variants as A B, B A, …, with the number of the pair."""
    for pair in range(pairs):
        for side in sides if pair % 2 else reversed(sides):
            yield pair, side


# ── saves ─────────────────────────────────────────────────────────────────────────────────────────


def saves(config: dict[str, Any]) -> list[dict[str, float]]:
    """Measure blocking times, and the time from our snapshot to its commit; rank 0 returns the
    readings."""
    rank, training = _new_initialized_training(config)
    ckpt = _checkpointer(training, every="at_notice")
    copies = [tensor.clone() for tensor in training.tensors]
    raw = _obstore(config)
    own_part = training.tensors[rank :: dist.get_world_size()]
    bodies = [tensor.numpy().data.cast("B") for tensor in own_part]
    own = dist.new_group(backend="gloo")  # separate: its thread runs collectives concurrently

    def put(pair: int) -> None:
        _run_concurrently(
            PUT_CONCURRENCY,
            lambda n: raw.put(f"raw-{pair}/{rank}-{n}", bodies[n]),
            range(len(bodies)),
        )

    readings: list[dict[str, float]] = [{} for _ in range(config["pairs"] + WARM_UP_ROUNDS)]
    for pair, side in alternating(("memcpy", "ours", "dcp", "raw"), len(readings)):
        training.step()
        reading = readings[pair]
        match side:
            case "memcpy":
                reading["memcpy_s"] = timed_together(lambda: _copy(copies, training.tensors))
            case "ours":
                reading |= _save_and_wait(ckpt)
            case "dcp":
                place = Path(config["dcp"], str(pair))
                reading["dcp_s"] = _save_with_dcp(training, place, own)
            case "raw":
                reading["raw_put_s"] = timed_together(partial(put, pair))
    return readings[WARM_UP_ROUNDS:]


def blocking_times(config: dict[str, Any]) -> list[float]:
    """Measure our blocking time alone; each save starts after the commit of the previous one."""
    _, training = _new_initialized_training(config)
    ckpt = _checkpointer(training, every="at_notice")
    found = []
    for _ in range(config["saves"] + WARM_UP_ROUNDS):
        training.step()
        found.append(_save_and_wait(ckpt)["ours_s"])
    return found[WARM_UP_ROUNDS:]


def _save_and_wait(ckpt: Any) -> dict[str, float]:
    """Save; return the blocking time and the time until the commit."""
    channel, slots = ckpt._channel, ckpt._slots  # noqa: SLF001 - to see when it is committed
    dist.barrier()
    began = time.perf_counter()
    ckpt.save()
    blocking_s = time.perf_counter() - began
    latest = max(
        (slot for slot in slots if slot.report_index is not None), key=lambda one: one.report_index
    )
    while channel.status_of(latest.report_index) not in ("committed", "lost"):
        time.sleep(0.002)
    commit_s = time.perf_counter() - began
    assert channel.status_of(latest.report_index) == "committed"
    return {
        "ours_s": slowest_rank(blocking_s),
        "commit_s": slowest_rank(commit_s),
    }


def _copy(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)


def _save_with_dcp(training: BenchmarkModel, path: Path, own: Any) -> float:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    saving: list[Any] = []

    def save() -> None:
        weights, state = get_state_dict(training.model, training.optimizer)
        whole = {"model": weights, "optimizer": state}
        saving.append(
            dcp.async_save(whole, checkpoint_id=str(path), process_group=own)  # type: ignore[attr-defined]  # not in __all__
        )

    blocking_s = timed_together(save)
    saving[0].result()
    return blocking_s


# ── restores ──────────────────────────────────────────────────────────────────────────────────────


def save_once(config: dict[str, Any]) -> None:
    """Save once, for `restores`."""
    _, training = _new_initialized_training(config)
    _save_and_wait(_checkpointer(training, every="at_notice"))


def restores(config: dict[str, Any]) -> list[dict[str, float]]:
    """Measure obstore alone: everything once, split over the ranks; and everything on each rank."""
    rank, training = _new_initialized_training(config)
    ckpt = _checkpointer(training, every="at_notice")
    raw = _obstore(config)
    names = [one["path"] for page in raw.list() for one in page if "/chunks/" in one["path"]]
    own_part = sorted(names)[rank :: dist.get_world_size()]

    def get(what: Sequence[str]) -> None:
        _run_concurrently(GET_CONCURRENCY, lambda name: len(raw.get(name).bytes()), what)

    sides: dict[str, Callable[[], None]] = {
        "restore_s": lambda: _restore_from_bucket(ckpt),
        "raw_get_s": lambda: get(own_part),
    }
    if not config["sharded"]:
        sides["raw_each_s"] = lambda: get(names)
    readings: list[dict[str, float]] = [{} for _ in range(config["pairs"] + WARM_UP_ROUNDS)]
    for pair, side in alternating([*sides], len(readings)):
        readings[pair][side] = timed_together(sides[side])
    return readings[WARM_UP_ROUNDS:]


def _restore_from_bucket(ckpt: Any) -> None:
    restored = ckpt.restore()
    assert restored is not None
    assert restored.source == "bucket"


# ── recoveries ────────────────────────────────────────────────────────────────────────────────────


def recover_repeatedly(config: dict[str, Any]) -> None:
    """Kill a worker after every save; every second time the snapshots in memory are deleted."""
    started = time.monotonic()
    rank, training = _new_training(config)
    ckpt = _checkpointer(training, every="at_notice")
    built = time.monotonic()
    found = ckpt.restore()
    restored = time.monotonic()
    if found is None:
        training.initialize_optimizer()
    training.step()
    attempt = int(found.step) if found is not None else 0
    source = found.source if found is not None else ""
    _record(
        config, "stepped", attempt, source=source, started=started, built=built, restored=restored
    )
    if attempt == config["kills"]:
        return
    ckpt.step()
    _save_and_wait(ckpt)
    if attempt % 2:
        for folder in ckpt._channel.segment_dirs:  # noqa: SLF001 - simulate lost memory
            for segment in folder.glob("*.segment"):
                segment.unlink(missing_ok=True)
    dist.barrier()
    if rank == attempt % dist.get_world_size():
        _record(config, "killed", attempt)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in count():
        training.step()


def _record(config: dict[str, Any], event: str, attempt: int, **fields: Any) -> None:
    line = json.dumps({"event": event, "attempt": attempt, "at": time.monotonic(), **fields})
    with Path(config["events"]).open("a") as events:
        events.write(line + "\n")


# ── steps ─────────────────────────────────────────────────────────────────────────────────────────


def steps(config: dict[str, Any]) -> list[dict[str, float]]:
    """Measure the duration of steps with and without saves."""
    _, training = _new_initialized_training(config)
    ckpt = _checkpointer(training, every="auto")

    def loop(*, saving: bool) -> None:
        for _ in range(config["steps"]):
            training.step()
            if saving:
                ckpt.step()

    loop(saving=True)
    readings: list[dict[str, float]] = [{} for _ in range(config["pairs"])]
    for pair, side in alternating(("never", "auto"), len(readings)):
        readings[pair][f"{side}_s"] = timed_together(partial(loop, saving=side == "auto"))
    return readings


# ── all ───────────────────────────────────────────────────────────────────────────────────────────


def _new_initialized_training(config: dict[str, Any]) -> tuple[int, BenchmarkModel]:
    rank, training = _new_training(config)
    training.initialize_optimizer()
    return rank, training


def _new_training(config: dict[str, Any]) -> tuple[int, BenchmarkModel]:
    import spotfit
    from spotfit.torch import init_module, prepare_model

    rank, sharded = spotfit.get_context().get_world_rank(), config["sharded"]
    prepare = _shard if sharded else prepare_model
    with init_module():
        training = BenchmarkModel(prepare, rank, config["layers"], config["width"], sharded=sharded)
    return rank, training


def _shard(model: torch.nn.Module) -> Any:
    """Shard the model by FSDP2, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _checkpointer(training: BenchmarkModel, every: Literal["auto", "at_notice"]) -> Any:
    from spotfit.torch import Checkpointer

    return Checkpointer(model=training.model, optimizer=training.optimizer, every=every)


def _obstore(config: dict[str, Any]) -> Any:
    """Return an obstore client for the storage of the run."""
    if config["endpoint"] is None:
        from obstore.store import LocalStore

        Path(config["runs"]).mkdir(parents=True, exist_ok=True)
        return LocalStore(config["runs"])
    from obstore.store import S3Store

    return S3Store(
        config["bucket"],
        endpoint=config["endpoint"],
        region="us-east-1",
        config={"unsigned_payload": config["endpoint"].startswith("https")},  # as spotfit does
        client_options={"allow_http": True},
    )


def _run_concurrently(concurrency: int, call: Callable[[Any], Any], what: Iterable[Any]) -> None:
    with ThreadPoolExecutor(concurrency) as pool:
        for _ in pool.map(call, what):
            pass
