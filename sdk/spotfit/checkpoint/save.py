"""One rank's part of a checkpoint: its files into the bucket, and then its manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from spotfit.checkpoint.manifest import Manifest, read_manifest
from spotfit.core.codec import encode
from spotfit.core.errors import ConfigError
from spotfit.store.api import Store
from spotfit.store.transfer import FileRecord, upload_tree


def save(store: Store, directory: Path, part: Manifest, *, again: bool = False) -> Manifest:
    """Upload everything in `directory` to the checkpoint's folder, then write the manifest.

    `store` is rooted at the run, `part` says which checkpoint and which rank; its `files` are
    filled in. `again`: this rank has used the name before in this round; then both merge. Files
    of other ranks are left alone; of equal names the last one stays. It may be called again after
    a failure.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"The checkpoint directory {directory} is not there.",
            do="Report it before it is removed, each rank a directory of its own: a SYNC report "
            "inside the `with` block of a temporary directory, an ASYNC one without such a block.",
        )
    return _written(store, part, upload_tree(store, part.folder, directory), again=again)


def record(store: Store, part: Manifest, *, again: bool = False) -> Manifest:
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
    return _written(store, part, files, again=again)


def _written(store: Store, part: Manifest, files: Sequence[FileRecord], *, again: bool) -> Manifest:
    earlier = read_manifest(store, part.key) if again else None
    merged = {file.name: file for file in (*(earlier.files if earlier else ()), *files)}
    manifest = replace(part, files=tuple(merged.values()))
    store.put(part.key, encode(manifest))
    return manifest
