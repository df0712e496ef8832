"""One rank's part of a checkpoint: its files into the bucket, and then its manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from spotfit.checkpoint.drop import note_sharing
from spotfit.checkpoint.handle import METADATA
from spotfit.checkpoint.manifest import Manifest, manifest_of
from spotfit.core.codec import encode
from spotfit.core.errors import ConfigError
from spotfit.store.api import Store
from spotfit.store.transfer import FileRecord, upload_tree


def save(store: Store, directory: Path, part: Manifest, *, base: str = "") -> Manifest:
    """Upload everything in `directory` to the checkpoint's folder, then write the manifest.

    `store` is rooted at the run, `part` says which checkpoint and which rank; its `files` are
    filled in. `base` is the checkpoint that had the name before: what this rank brought to it, and
    does not bring anew, is listed, too, and stays where it lies. Files of other ranks are left
    alone; of equal names the last one stays. It may be called again after a failure.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"The checkpoint directory {directory} is not there.",
            do="Report it before it is removed, each rank a directory of its own: a SYNC report "
            "inside the `with` block of a temporary directory, an ASYNC one without such a block.",
        )
    return _written(store, part, upload_tree(store, part.folder, directory), base)


def record(store: Store, part: Manifest, *, base: str = "") -> Manifest:
    """Write the manifest of files that already lie in `part.folder`, as `save` would.

    What they hold is not read: later they are checked by name and size only.
    """
    folder = f"{part.folder}/"
    found = [one for one in store.list(part.folder) if one.key.startswith(folder)]
    if not found:
        raise ConfigError(
            f"There is nothing in {part.folder} of {store.url}, though it was reported.",
            do="Write its files there before reporting it.",
        )
    files = [FileRecord(one.key.removeprefix(folder), one.size_bytes, "") for one in found]
    return _written(store, part, files, base)


def _written(store: Store, part: Manifest, files: Sequence[FileRecord], base: str) -> Manifest:
    before = tuple(_not_replaced(store, base, part, files)) if base else ()
    manifest = replace(part, files=(*files, *before))
    note_sharing(store, manifest, (part.at, *(file.at for file in before)))
    store.put(part.key, encode(manifest))
    return manifest


def _not_replaced(
    store: Store, base: str, part: Manifest, files: Sequence[FileRecord]
) -> Iterator[FileRecord]:
    """What this rank brought to that checkpoint and does not bring anew."""
    replaced = {METADATA, *(file.name for file in files)}
    earlier = manifest_of(store, base, part.rank)
    if earlier is None:
        return
    for file in earlier.files:
        at = file.at or earlier.folder
        if file.name not in replaced and at != part.folder:
            yield replace(file, at=at)
