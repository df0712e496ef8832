"""The checkpoints of a run, for people: what there is, what is in one, one as a file, one away."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from spotfit.checkpoint.drop import drop
from spotfit.checkpoint.export import export_safetensors, tensors_of
from spotfit.checkpoint.saved import Saved, open_saved
from spotfit.client.handle import ledger_at
from spotfit.core.errors import ConfigError, IntegrityError, MachineError, NotFoundError
from spotfit.host import extras
from spotfit.ledger.run import Ledger
from spotfit.model.events import CheckpointCommitted, CheckpointDropped
from spotfit.model.metrics import metrics_from_json
from spotfit.store.api import Store

_SAFETENSORS = ".safetensors"
_TORCH = (".pt", ".pth", ".bin")
_ENDINGS = f"Let its name end with {_SAFETENSORS}, or with .pt for torch.save."


class Content(NamedTuple):
    """What a Checkpointer saved in one."""

    step: int
    epoch: int
    world_size: int
    tensors: int
    parameters: int
    """Numbers in the model's tensors."""
    shared_bytes: int
    """What lies in the folders of earlier ones."""


class Kept(NamedTuple):
    """One checkpoint that a run keeps."""

    name: str
    size_bytes: int
    metrics: dict[str, Any]
    step: int | None
    """At which a Checkpointer saved it; None for a report of the user's own files."""
    why: str = ""
    """Why it was saved just then."""
    content: Content | None = None
    """None where nobody looked, and for the user's own files."""
    broken: str = ""
    """Why it cannot be read any more."""


def kept_in(url: str) -> list[Kept]:
    """The checkpoints of that run, the oldest first, as the journal tells of them."""
    ledger = ledger_at(url)
    return [_listed(ledger.store, one) for one in ledger.view.checkpoints]


def kept_as(url: str, name: str) -> Kept:
    """That one, and what is in it; '' is the latest. Raises `NotFoundError`."""
    ledger = ledger_at(url)
    return _told(ledger.store, _named(ledger, name))


def export(url: str, name: str, path: Path, *, everything: bool = False) -> str:
    """Write that checkpoint's model to one file; the checkpoint's name. '' is the latest.

    The file's ending says how: `.safetensors`, or `.pt` for torch.save, which can hold `everything`
    and needs torch. Raises `ConfigError` and `NotFoundError`.
    """
    _check_file(path, everything=everything)
    ledger = ledger_at(url)
    one, store = _named(ledger, name), ledger.store
    saved = open_saved(store, one.name)
    if saved is None:
        raise ConfigError(
            f"{one.name} holds files of your own, and no snapshot of a Checkpointer.",
            do=f"Its files are in {store.url}/{one.name}.",
        )
    write(saved, path, everything=everything)
    return one.name


def write(saved: Saved, path: Path, *, everything: bool) -> None:
    """One file of a snapshot, as its ending says.

    Raises `ConfigError`, `IntegrityError` for damage, and `MachineError` where the file cannot be
    written.
    """
    _check_file(path, everything=everything)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(saved, path, everything=everything)
    except OSError as error:
        raise MachineError(
            f"{path} cannot be written: {error.strerror or error}.",
            do="Name a file in a folder that you may write to, with room for the model.",
        ) from error


def _write(saved: Saved, path: Path, *, everything: bool) -> None:
    if path.suffix.lower() == _SAFETENSORS:
        export_safetensors(saved, path)
        return
    extras.need("torch", extra="torch")
    from spotfit.frameworks.torch.export import export_torch

    export_torch(saved, path, everything=everything)


def remove(url: str, name: str) -> str:
    """Delete that checkpoint of a run that has ended; '' is none, not the latest.

    Raises `ConfigError` and `NotFoundError`.
    """
    ledger = ledger_at(url)
    if not name:
        raise ConfigError(
            "No checkpoint is named that is to be deleted.",
            do="Take a name from `spotfit checkpoints ls`.",
        )
    one = _named(ledger, name)
    if ledger.view.active:
        raise ConfigError(
            f"The run in {ledger.store.url} goes on: its leader decides what is kept.",
            do="Wait for its end, or set num_to_keep of CheckpointConfig.",
        )
    after = ledger.append(CheckpointDropped(one.name, "spotfit checkpoints rm"), after=ledger.view)
    if any(left.name == one.name for left in after.checkpoints):
        raise ConfigError("The run has begun again meanwhile.", do="Wait for its end.")
    drop(ledger.store, one.name)
    return one.name


def _named(ledger: Ledger, name: str) -> CheckpointCommitted:
    kept = ledger.view.checkpoints
    found = [one for one in kept if name in ("", one.name)]
    if found := found or [one for one in kept if name == one.called]:
        return found[-1]
    names = ", ".join(one.name for one in ledger.view.checkpoints)
    raise NotFoundError(
        f"The run in {ledger.store.url} keeps no checkpoint{f' {name}' if name else ''}.",
        do=f"It has {names}." if names else "It has saved none, or all were dropped.",
    )


def _listed(store: Store, one: CheckpointCommitted) -> Kept:
    """Nothing of it is read, but where its entry is of a time when nobody said its step."""
    if one.snapshot and one.step is None:
        return _told(store, one)
    return Kept(one.name, one.size_bytes, metrics_from_json(one.metrics), one.step, one.why)


def _told(store: Store, one: CheckpointCommitted) -> Kept:
    kept = Kept(one.name, one.size_bytes, metrics_from_json(one.metrics), one.step, one.why)
    try:
        saved = open_saved(store, one.name)
    except IntegrityError as broken:
        return kept._replace(broken=broken.what)
    if saved is None:
        return kept
    return kept._replace(step=saved.indices[0].step, content=_content(saved))


def _content(saved: Saved) -> Content:
    first = saved.indices[0]
    weights = tensors_of(saved)
    return Content(
        step=first.step,
        epoch=first.epoch,
        world_size=first.world_size,
        tensors=len({piece.key for index in saved.indices for piece in index.pieces}),
        parameters=sum(math.prod(pieces[0][1].shape) for pieces in weights.values()),
        shared_bytes=sum(
            chunk.size_bytes for index in saved.indices for chunk in index.chunks if chunk.at
        ),
    )


def _check_file(path: Path, *, everything: bool) -> None:
    if path == Path():
        raise ConfigError("No file is named that is to be written.", do=_ENDINGS)
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder.", do=f"Name a file in it: {path / f'model{_SAFETENSORS}'}."
        )
    kind = path.suffix.lower()
    if kind == _SAFETENSORS and everything:
        raise ConfigError(
            "safetensors holds tensors only, not the whole state.",
            do="Export to a file that ends with .pt.",
        )
    if kind not in (_SAFETENSORS, *_TORCH):
        raise ConfigError(
            f"{path.name} does not say what kind of file is wanted.",
            do=_ENDINGS,
        )
