"""List, describe, export and delete the checkpoints of a run (`spotfit checkpoints`)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from spotfit.checkpoint.export import export_safetensors, model_pieces, reject_missing_weights
from spotfit.checkpoint.gc import delete_checkpoint
from spotfit.checkpoint.reader import SavedState, open_committed_snapshot
from spotfit.client.keyring import key_of
from spotfit.client.run_handle import open_ledger
from spotfit.core.errors import ConfigError, IntegrityError, NotFoundError
from spotfit.host import plugins
from spotfit.ledger.journal import Ledger
from spotfit.model.events import CheckpointCommitted, CheckpointDropped
from spotfit.model.reporting import metrics_from_json
from spotfit.store.api import Store

_SAFETENSORS_SUFFIX = ".safetensors"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin")
_SUFFIX_HELP = (
    f"Pass a file name that ends with {_SAFETENSORS_SUFFIX}, or with .pt for the format of "
    "torch.save."
)


class CheckpointContent(NamedTuple):
    """Content of a checkpoint that a Checkpointer saved."""

    step: int
    epoch: int
    world_size: int
    tensors: int
    parameters: int
    """Number of elements of all model tensors."""
    shared_bytes: int
    """Bytes that are stored in the directories of earlier checkpoints."""


class CheckpointInfo(NamedTuple):
    """A stored checkpoint of a run, for `spotfit checkpoints`."""

    name: str
    size_bytes: int
    metrics: dict[str, Any]
    step: int | None
    """Step at which a Checkpointer saved it; None for files that the user reported."""
    reason: str = ""
    """Why a Checkpointer saved it at this step."""
    content: CheckpointContent | None = None
    """None if it was not read, and for files that the user reported."""
    read_error: str = ""
    """Why it cannot be read; '' if it can, or if it was not read."""


def list_checkpoints(url: str) -> list[CheckpointInfo]:
    """Return the stored checkpoints of a run, oldest first, from its journal.

    `url` is the run's directory, `<storage_path>/<name>`. An empty list if it has none. `content`
    is normally not read. Raises `RunNotFoundError`, `JournalError` or `StoreError`.
    """
    ledger = open_ledger(url)
    return [
        # Journal entries of early versions lack the step; then the checkpoint itself is read.
        _inspect(ledger.store, each) if each.is_snapshot and each.step is None else _summarize(each)
        for each in ledger.view.checkpoints
    ]


def describe_checkpoint(url: str, name: str) -> CheckpointInfo:
    """Return the stored checkpoint `name` with its content; the latest one for ''.

    `url` is the run's directory, `<storage_path>/<name>`. For a corrupt checkpoint the result has a
    `read_error`. Raises `NotFoundError` if there is no such checkpoint, and `RunNotFoundError`.
    """
    ledger = open_ledger(url)
    return _inspect(ledger.store, _find_checkpoint(ledger, name))


def export_checkpoint(url: str, name: str, path: Path, *, full_state: bool = False) -> str:
    """Write the model of a checkpoint to one file; return the checkpoint's name.

    `url` is the run's directory, `name` the checkpoint or '' for the latest, `path` the file, which
    is replaced if it exists. Its suffix selects the format: `.safetensors`, or `.pt` (needs torch),
    which with `full_state` also contains the optimizer and all other state. Raises `ConfigError`
    for an invalid path and for a checkpoint that was not saved by a Checkpointer, `NotFoundError`
    and `RunNotFoundError`, and `IntegrityError` if it is corrupt.
    """
    # Before the journal is read, which may take seconds.
    _check_target(path, full_state=full_state)
    ledger = open_ledger(url)
    checkpoint, store = _find_checkpoint(ledger, name), ledger.store
    saved = open_committed_snapshot(store, checkpoint.name, digest=checkpoint.manifests_digest)
    if saved is None:
        raise ConfigError(
            f"The checkpoint {checkpoint.name} in {store.url} cannot be exported: it contains "
            "files reported by the training function, not a snapshot of a Checkpointer.",
            do=f"Copy the files from {store.url}/{checkpoint.name}.",
        )
    write_checkpoint_file(saved, path, full_state=full_state)
    return checkpoint.name


def write_checkpoint_file(saved: SavedState, path: Path, *, full_state: bool) -> None:
    """Write a snapshot to one file in the format that the suffix of `path` selects.

    `.safetensors`, or `.pt`, `.pth` or `.bin` for the format of `torch.save`, which with
    `full_state` also contains the optimizer and all other state. Parent directories are created.
    Raises `ConfigError` for an invalid or unwritable path, or `full_state` with safetensors;
    `MissingExtraError` without torch; and `IntegrityError` for a corrupt snapshot.
    """
    _check_target(path, full_state=full_state)
    if not full_state:
        reject_missing_weights(saved)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == _SAFETENSORS_SUFFIX:
            export_safetensors(saved, path)
            return
        _reject_pytree(saved, path)
        plugins.require_module("torch", extra="torch")
        # The client is below the torch package in the layers, so it imports the exporter by name.
        exporter = plugins.require_module("spotfit.torch.checkpoint.torch_export", extra="torch")
        exporter.export_torch(saved, path, everything=full_state)
    except OSError as error:
        raise ConfigError(
            f"The output file {path} cannot be written: {error.strerror or error}.",
            do="Choose a directory with write permission and enough space for the model.",
        ) from error


def _reject_pytree(saved: SavedState, path: Path) -> None:
    if all(piece.key[0] == "state" for index in saved.indices for piece in index.pieces):
        raise ConfigError(
            f"The checkpoint cannot be exported to {path}: it is a pytree of JAX, which torch does "
            "not read.",
            do="Export it to a file that ends with .safetensors.",
        )


def remove_checkpoint(url: str, name: str) -> str:
    """Delete a checkpoint of a run that has ended, from journal and storage; return its name.

    `url` is the run's directory, `<storage_path>/<name>`. Raises `ConfigError` if `name` is empty
    or the run is active, `NotFoundError` if there is no such checkpoint, and `RunNotFoundError`.
    """
    ledger = open_ledger(url)
    # Unlike elsewhere, '' does not mean the latest: a forgotten argument must not delete it.
    if not name:
        raise ConfigError(
            "The name of the checkpoint to delete is missing.",
            do=f"Pass one of the names that `spotfit checkpoints ls {url}` lists.",
        )
    checkpoint = _find_checkpoint(ledger, name)
    if ledger.view.is_active:
        raise ConfigError(
            f"{checkpoint.name} was not deleted: the run in {ledger.store.url} is active, and "
            "its leader manages the checkpoints.",
            do="Wait for the end of the run, or set CheckpointConfig(num_to_keep=...).",
        )
    if key_of(ledger.store) is None:
        raise ConfigError(
            f"{checkpoint.name} was not deleted: this computer has no key of the run in "
            f"{ledger.store.url}, without which the deletion cannot be recorded.",
            do="Run the command on the computer where fit() was called, or set SPOTFIT_RUN_ID and "
            "SPOTFIT_RUN_SECRET to the name and the content of the run's file in ~/.spotfit/keys "
            "there.",
        )
    # First the journal entry, then the data: if the deletion is interrupted, unreferenced objects
    # remain, but no checkpoint is listed without its data.
    event = CheckpointDropped(name=checkpoint.name, reason="spotfit checkpoints rm")
    after = ledger.append(event, after=ledger.view)
    # The append fails if a fit() started meanwhile; then its leader manages the checkpoints.
    if any(each.name == checkpoint.name for each in after.checkpoints):
        raise ConfigError(
            f"The run in {ledger.store.url} was started again, so {checkpoint.name} was not "
            "deleted.",
            do=f"Wait for the end of the run, then try to delete {checkpoint.name} again.",
        )
    delete_checkpoint(ledger.store, checkpoint.name)
    return checkpoint.name


def _find_checkpoint(ledger: Ledger, name: str) -> CheckpointCommitted:
    stored = ledger.view.checkpoints
    matches = [each for each in stored if name in ("", each.name)]
    # The user's checkpoint_dir_name may have been made unique with a suffix (decision 0043).
    if matches := matches or [each for each in stored if name == each.requested_name]:
        return matches[-1]
    names = ", ".join(each.name for each in stored)
    raise NotFoundError(
        f"The run in {ledger.store.url} has no checkpoint{f' {name}' if name else ''}.",
        do=f"Pass one of its checkpoints: {names}."
        if names
        else "Check the URL of the run. Checkpoints exist after the first report with checkpoint= "
        "and until they are deleted.",
    )


def _summarize(checkpoint: CheckpointCommitted) -> CheckpointInfo:
    return CheckpointInfo(
        name=checkpoint.name,
        size_bytes=checkpoint.size_bytes,
        metrics=metrics_from_json(checkpoint.metrics),
        step=checkpoint.step,
        reason=checkpoint.reason,
    )


def _inspect(store: Store, checkpoint: CheckpointCommitted) -> CheckpointInfo:
    info = _summarize(checkpoint)
    try:
        saved = open_committed_snapshot(store, checkpoint.name, digest=checkpoint.manifests_digest)
    except IntegrityError as error:
        return info._replace(read_error=error.message)
    if saved is None:
        return info
    return info._replace(step=saved.indices[0].step, content=_read_content(saved))


def _read_content(saved: SavedState) -> CheckpointContent:
    # Step, epoch and world size are equal in the indices of all ranks.
    first = saved.indices[0]
    model_tensors = model_pieces(saved)
    return CheckpointContent(
        step=first.step,
        epoch=first.epoch,
        world_size=first.world_size,
        # A tensor that is split over ranks has a piece in several indices.
        tensors=len({piece.key for index in saved.indices for piece in index.pieces}),
        parameters=sum(math.prod(pieces[0][1].shape) for pieces in model_tensors.values()),
        shared_bytes=sum(
            chunk.size_bytes
            for index in saved.indices
            for chunk in index.chunks
            if chunk.source_prefix
        ),
    )


def _check_target(path: Path, *, full_state: bool) -> None:
    if path == Path():
        raise ConfigError("The name of the output file is missing.", do=_SUFFIX_HELP)
    if path.is_dir():
        raise ConfigError(
            f"The output path {path} is a directory, not a file.",
            do=f"Pass a file, for example {path / f'model{_SAFETENSORS_SUFFIX}'}.",
        )
    suffix = path.suffix.lower()
    if suffix == _SAFETENSORS_SUFFIX and full_state:
        raise ConfigError(
            f"The output file {path} can contain only tensors, not the full training state: its "
            "format is safetensors.",
            do="Export to a file that ends with .pt.",
        )
    if suffix not in (_SAFETENSORS_SUFFIX, *_TORCH_SUFFIXES):
        raise ConfigError(
            f"The suffix {path.suffix!r} of the output file {path} does not select a file format.",
            do=_SUFFIX_HELP,
        )
