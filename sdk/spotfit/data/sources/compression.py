"""Compressed files, which are decompressed as a whole."""

from __future__ import annotations

import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.sources.file_format import OpenFile

_BY_EXTENSION = {
    "br": "brotli",
    "bz2": "bz2",
    "gz": "gzip",
    "lz4": "lz4",
    "tgz": "gzip",
    "zst": "zstd",
}


def compression_of(file: OpenFile, stated: str | None) -> str | None:
    """Return the compression of a file: the stated one, or that of its extension; None for none."""
    return stated or _BY_EXTENSION.get(file.path.rpartition(".")[2].lower())


def decompress(file: OpenFile, stated: str | None) -> bytes | None:
    """Return the content of a compressed file; None if it is not compressed.

    Raises `ConfigError` if it cannot be decompressed.
    """
    compression = compression_of(file, stated)
    if compression is None:
        return None
    try:
        with pa.input_stream(pa.BufferReader(file.read()), compression=compression) as stream:
            body: bytes = stream.read()
            return body
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file.path} cannot be decompressed with {compression}: {error}",
            do="Correct the extension of the file, or arrow_open_stream_args.",
        ) from error
