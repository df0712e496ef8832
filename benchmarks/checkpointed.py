"""What each rank does in `checkpointer.py`: save and restore half a gigabyte, alternating variants.

The variants are measured in the same loop of the same workers, one directly after the other, in
alternating order. spotfit is imported only when needed: the same training runs in the environment
of a peer.
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
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

LAYERS = 43
WIDTH = 1024
"""43 layers of 1024 by 1024 floats: 172 MiB of weights, with Adam's two averages 516 MiB."""
PUTS, GETS = 4, 8
"""So many at once in each rank, as we do."""
WARM_UP = 2
"""The first ones allocate."""


class Training:
    """Weights and Adam's state, and a step that changes all of them."""

    def __init__(
        self,
        prepared: Callable[[torch.nn.Module], Any],
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
        self.model = prepared(torch.nn.Sequential(*linear))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self._inputs = torch.rand(8, width)

    def begin(self) -> None:
        """Have Adam's state, too."""
        self.step()
        torch.manual_seed(self._seed)  # no two layers alike: equal bytes are sent only once
        for average in self._averages:
            average.uniform_()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._inputs).square().mean().backward()
        self.optimizer.step()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that this rank holds of what is saved."""
        return [*map(_here, self.model.parameters()), *self._averages]

    @property
    def _averages(self) -> list[torch.Tensor]:
        known = [part for state in self.optimizer.state.values() for part in state.values()]
        return [_here(tensor) for tensor in known if tensor.dim() > 0]


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that is sharded over the ranks, this rank's part."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def together(work: Callable[[], object]) -> float:
    """Return the duration on all ranks, after a common start."""
    dist.barrier()
    began = time.perf_counter()
    work()
    return slowest(time.perf_counter() - began)


def slowest(seconds: float) -> float:
    """Return the duration of the slowest rank."""
    own = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return float(own)


def alternately(sides: Sequence[str], pairs: int) -> Iterator[tuple[int, str]]:
    """Yield the variants as A B, B A, …, with the number of the pair."""
    for pair in range(pairs):
        for side in sides if pair % 2 else reversed(sides):
            yield pair, side


# ── saves ────────────────────────────────────────────────────────────────────────────────────────


def saves(config: dict[str, Any]) -> list[dict[str, float]]:
    """Measure blocking times, and the time from our snapshot to its commit; rank 0 returns the
    readings."""
    rank, training = _begun(config)
    ckpt = _checkpointer(training, every="at_notice")
    copies = [tensor.clone() for tensor in training.tensors]
    raw = _raw(config)
    mine = training.tensors[rank :: dist.get_world_size()]
    bodies = [tensor.numpy().data.cast("B") for tensor in mine]
    own = dist.new_group(backend="gloo")  # its thread meets the others while we meet them, too

    def put(pair: int) -> None:
        _each(PUTS, lambda n: raw.put(f"raw-{pair}/{rank}-{n}", bodies[n]), range(len(bodies)))

    readings: list[dict[str, float]] = [{} for _ in range(config["pairs"] + WARM_UP)]
    for pair, side in alternately(("memcpy", "ours", "dcp", "raw"), len(readings)):
        training.step()
        reading = readings[pair]
        match side:
            case "memcpy":
                reading["memcpy_s"] = together(lambda: _copy(copies, training.tensors))
            case "ours":
                reading |= _saved(ckpt)
            case "dcp":
                place = Path(config["dcp"], str(pair))
                reading["dcp_s"] = _saved_by_dcp(training, place, own)
            case "raw":
                reading["raw_put_s"] = together(partial(put, pair))
    return readings[WARM_UP:]


def stalls(config: dict[str, Any]) -> list[float]:
    """Measure our blocking time alone; each save starts after the commit of the previous one."""
    _, training = _begun(config)
    ckpt = _checkpointer(training, every="at_notice")
    found = []
    for _ in range(config["saves"] + WARM_UP):
        training.step()
        found.append(_saved(ckpt)["ours_s"])
    return found[WARM_UP:]


def _saved(ckpt: Any) -> dict[str, float]:
    """The standstill, and the time to the commit as rank 0 hears of it."""
    desk, slots = ckpt._channel, ckpt._slots  # noqa: SLF001 - to see when it is committed
    dist.barrier()
    began = time.perf_counter()
    ckpt.save()
    stall_s = time.perf_counter() - began
    latest = max(
        (slot for slot in slots if slot.report_index is not None), key=lambda one: one.report_index
    )
    while desk.status_of(latest.report_index) not in ("committed", "lost"):
        time.sleep(0.002)
    commit_s = time.perf_counter() - began
    assert desk.status_of(latest.report_index) == "committed"
    return {
        "ours_s": slowest(stall_s),
        "commit_s": slowest(commit_s),
        "mine_bytes": float(latest.arena.size_bytes),
    }


def _copy(copies: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)


def _saved_by_dcp(training: Training, path: Path, own: Any) -> float:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    saving: list[Any] = []

    def save() -> None:
        weights, state = get_state_dict(training.model, training.optimizer)
        whole = {"model": weights, "optimizer": state}
        saving.append(
            dcp.async_save(whole, checkpoint_id=str(path), process_group=own)  # type: ignore[attr-defined]  # exported in fact
        )

    stall_s = together(save)
    saving[0].result()
    return stall_s


# ── restores ─────────────────────────────────────────────────────────────────────────────────────


def one_save(config: dict[str, Any]) -> None:
    """Save once, for `restores`."""
    _, training = _begun(config)
    _saved(_checkpointer(training, every="at_notice"))


def restores(config: dict[str, Any]) -> list[dict[str, float]]:
    """Measure obstore alone: everything once, split over the ranks; and everything on each rank."""
    rank, training = _begun(config)
    ckpt = _checkpointer(training, every="at_notice")
    raw = _raw(config)
    names = [one["path"] for page in raw.list() for one in page if "/chunks/" in one["path"]]
    mine = sorted(names)[rank :: dist.get_world_size()]

    def get(what: Sequence[str]) -> None:
        _each(GETS, lambda name: len(raw.get(name).bytes()), what)

    sides: dict[str, Callable[[], None]] = {
        "restore_s": lambda: _restore_from_bucket(ckpt),
        "raw_get_s": lambda: get(mine),
    }
    if not config["sharded"]:
        sides["raw_each_s"] = lambda: get(names)
    readings: list[dict[str, float]] = [{} for _ in range(config["pairs"] + WARM_UP)]
    for pair, side in alternately([*sides], len(readings)):
        readings[pair][side] = together(sides[side])
    return readings[WARM_UP:]


def _restore_from_bucket(ckpt: Any) -> None:
    restored = ckpt.restore()
    assert restored is not None
    assert restored.source == "bucket"


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────


def killed(config: dict[str, Any]) -> None:
    """Kill a worker after every save; every second time the snapshots in memory are deleted."""
    started = time.monotonic()
    rank, training = _blank(config)
    ckpt = _checkpointer(training, every="at_notice")
    built = time.monotonic()
    found = ckpt.restore()
    restored = time.monotonic()
    if found is None:
        training.begin()
    training.step()
    life = int(found.step) if found is not None else 0
    source = found.source if found is not None else ""
    _note(config, "stepped", life, source=source, started=started, built=built, restored=restored)
    if life == config["kills"]:
        return
    ckpt.step()
    _saved(ckpt)
    if life % 2:
        for folder in ckpt._channel.segment_dirs:  # noqa: SLF001 - as if the machine had forgotten
            for segment in folder.glob("*.segment"):
                segment.unlink(missing_ok=True)
    dist.barrier()
    if rank == life % dist.get_world_size():
        _note(config, "killed", life)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in count():
        training.step()


def _note(config: dict[str, Any], what: str, life: int, **facts: Any) -> None:
    line = json.dumps({"what": what, "life": life, "at": time.monotonic(), **facts})
    with Path(config["notes"]).open("a") as notes:
        notes.write(line + "\n")


# ── steps ────────────────────────────────────────────────────────────────────────────────────────


def steps(config: dict[str, Any]) -> list[dict[str, float]]:
    """Measure the duration of steps with and without saves."""
    _, training = _begun(config)
    ckpt = _checkpointer(training, every="auto")

    def loop(*, saving: bool) -> None:
        for _ in range(config["steps"]):
            training.step()
            if saving:
                ckpt.step()

    loop(saving=True)
    readings: list[dict[str, float]] = [{} for _ in range(config["pairs"])]
    for pair, side in alternately(("never", "auto"), len(readings)):
        readings[pair][f"{side}_s"] = together(partial(loop, saving=side == "auto"))
    return readings


# ── all ──────────────────────────────────────────────────────────────────────────────────────────


def _begun(config: dict[str, Any]) -> tuple[int, Training]:
    rank, training = _blank(config)
    training.begin()
    return rank, training


def _blank(config: dict[str, Any]) -> tuple[int, Training]:
    import spotfit
    from spotfit.torch import init_module, prepare_model

    rank, sharded = spotfit.get_context().get_world_rank(), config["sharded"]
    prepared = _sharded if sharded else prepare_model
    with init_module():
        training = Training(prepared, rank, config["layers"], config["width"], sharded=sharded)
    return rank, training


def _sharded(model: torch.nn.Module) -> Any:
    """FSDP2, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _checkpointer(training: Training, every: str) -> Any:
    from spotfit.torch import Checkpointer

    return Checkpointer(model=training.model, optimizer=training.optimizer, every=every)


def _raw(config: dict[str, Any]) -> Any:
    """obstore's own store, where ours keeps its runs."""
    if config["endpoint"] is None:
        from obstore.store import LocalStore

        Path(config["runs"]).mkdir(parents=True, exist_ok=True)
        return LocalStore(config["runs"])
    from obstore.store import S3Store

    return S3Store(
        config["bucket"],
        endpoint=config["endpoint"],
        region="us-east-1",
        config={"unsigned_payload": config["endpoint"].startswith("https")},  # as ours
        client_options={"allow_http": True},
    )


def _each(at_once: int, call: Callable[[Any], Any], what: Iterable[Any]) -> None:
    with ThreadPoolExecutor(at_once) as pool:
        for _ in pool.map(call, what):
            pass
