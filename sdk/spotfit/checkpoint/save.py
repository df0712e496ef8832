"""One rank's part of a checkpoint: its files into the bucket, and then its manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from spotfit.checkpoint.manifest import Manifest
from spotfit.core.codec import encode
from spotfit.core.errors import ConfigError
from spotfit.ledger import keys
from spotfit.store.api import Store
from spotfit.store.transfer import FileRecord, upload_tree


def save(
    store: Store, directory: Path, part: Manifest, *, earlier: Sequence[FileRecord] = ()
) -> Manifest:
    """Upload everything in `directory` to the checkpoint's folder, then write the manifest.

    `store` is rooted at the run, `part` says which checkpoint and which rank; its `files` are
    filled in. `earlier` lists what this rank brought to the same name before: names used twice
    merge. Files of other ranks are left alone; of equal names the last one stays. It may be
    called again after a failure.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"The checkpoint directory {directory} is not there.",
            do="Report it before it is removed: inside the `with` block of a temporary directory.",
        )
    return _written(store, part, earlier, upload_tree(store, part.folder, directory))


def record(store: Store, part: Manifest, *, earlier: Sequence[FileRecord] = ()) -> Manifest:
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
    return _written(store, part, earlier, files)


def _written(
    store: Store, part: Manifest, earlier: Sequence[FileRecord], files: Sequence[FileRecord]
) -> Manifest:
    merged = {file.name: file for file in (*earlier, *files)}
    manifest = replace(part, files=tuple(merged.values()))
    store.put(keys.manifest(part.name, part.round, part.rank), encode(manifest))
    return manifest
