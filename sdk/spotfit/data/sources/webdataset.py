"""WebDataset: tar files in which the consecutive files of one name are a row.

A unit is a range of members. Columns contain the bytes of the files; a transform decodes them when
batches are made.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import IO, Any, NamedTuple, cast

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.formats.column_arrays import column_from_values
from spotfit.data.plans.transforms import BlockFunction
from spotfit.data.source import Decode
from spotfit.data.sources.compression import decompress
from spotfit.data.sources.file_format import FileContent, FileUnit, OpenFile
from spotfit.data.sources.images import image_module
from spotfit.data.sources.range_reader import RangeReader

KEY = "__key__"
URL = "__url__"
UNIT_BYTES = 8 * 2**20
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")
"""Key and extension: everything after the first point in the name of the file."""


class _Sample(NamedTuple):
    key: str
    start: int
    """Where the header of the first member begins."""
    members: Mapping[str, tarfile.TarInfo]
    """By extension."""


@dataclass(frozen=True)
class WebDatasetFormat:
    """Reads tar files; the columns are the key, the extensions of all files, and the URL."""

    suffixes: tuple[str, ...] | None = None
    """Extensions that are read, with '*' and '?' as patterns; None: all."""
    compression: str | None = None

    @property
    def identity(self) -> str:
        """The options."""
        return f"webdataset {self.suffixes} {self.compression}"

    def inspect(self, file: OpenFile) -> FileContent:
        """Read all headers."""
        body = decompress(file, self.compression)
        stream = RangeReader(file) if body is None else io.BytesIO(body)
        samples = [*self._samples(file, stream)]
        extensions = dict.fromkeys(name for one in samples for name in one.members)
        fields = [
            (KEY, pa.string()),
            *((name, pa.binary()) for name in extensions),
            (URL, pa.string()),
        ]
        if body is None:
            units = _group(samples, file.size_bytes)
        else:
            units = [FileUnit(0, len(samples), len(body))] if samples else []
        return FileContent(pa.schema(fields if samples else []), units)

    def fetch(self, file: OpenFile, unit: FileUnit, schema: pa.Schema) -> Decode:
        """Fetch a range of members."""
        body = decompress(file, self.compression)
        if body is None:
            body = file.read(unit.position, unit.size_bytes)
        return partial(self._take_members, body, file, schema)

    def _take_members(self, body: bytes, file: OpenFile, schema: pa.Schema) -> pa.Table:
        samples = [*self._samples(file, io.BytesIO(body))]
        view = memoryview(body)
        columns: dict[str, pa.Array] = {}
        for name in schema.names:
            if name == KEY:
                columns[name] = pa.array([one.key for one in samples], pa.string())
            elif name == URL:
                columns[name] = pa.repeat(file.path, len(samples))
            else:
                found = [one.members.get(name) for one in samples]
                columns[name] = pa.array([_content(view, one) for one in found], pa.binary())
        return pa.table(columns)

    def _samples(self, file: OpenFile, stream: io.RawIOBase | io.BytesIO) -> Iterator[_Sample]:
        keys: set[str] = set()
        key, start = "", 0
        members: dict[str, tarfile.TarInfo] = {}
        for member in _members(file, stream):
            name = _NAME.fullmatch(member.name)
            if name is None or not member.isreg():
                continue
            if name[1] != key:
                if members:
                    yield _Sample(key, start, members)
                if name[1] in keys:
                    raise _invalid_error(file, f"the files of {name[1]!r} are not consecutive")
                key, start, members = name[1], member.offset, {}
                keys.add(key)
            if name[2] in members:
                raise _invalid_error(file, f"{member.name!r} is there twice")
            if self._is_wanted(name[2]):
                members[name[2]] = member
        if members:
            yield _Sample(key, start, members)

    def _is_wanted(self, extension: str) -> bool:
        return self.suffixes is None or any(
            fnmatch(f".{extension}", pattern if pattern.startswith((".", "*")) else f".{pattern}")
            for pattern in self.suffixes
        )


def _members(file: OpenFile, stream: io.RawIOBase | io.BytesIO) -> Iterator[tarfile.TarInfo]:
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r:") as archive:
            yield from archive
    except tarfile.TarError as error:
        raise _invalid_error(file, str(error)) from error


def _content(body: memoryview, member: tarfile.TarInfo | None) -> memoryview | None:
    if member is None:
        return None
    return body[member.offset_data : member.offset_data + member.size]


def _group(samples: Sequence[_Sample], size_bytes: int) -> list[FileUnit]:
    """Return units whose ranges begin at a sample and end at the next unit."""
    units: list[FileUnit] = []
    ends = [one.start for one in samples[1:]] + [size_bytes]
    for sample, end in zip(samples, ends, strict=True):
        if units and end - units[-1].position <= UNIT_BYTES:
            last = units[-1]
            units[-1] = FileUnit(last.position, last.rows + 1, end - last.position)
        else:
            units.append(FileUnit(sample.start, 1, end - sample.start))
    return units


def _invalid_error(file: OpenFile, reason: str) -> ConfigError:
    return ConfigError(
        f"{file.path} is not a tar file of a WebDataset: {reason}.",
        do="Write the file again with its members sorted by name, for example by "
        "`tar --sort=name -cf …`, or state its compression.",
    )


# --- decoding -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeSamples:
    """Decodes the columns of known extensions, as the default decoder of Ray does."""

    name = "read_webdataset"
    runs_user_code = False
    identity = "read_webdataset decoder"

    def bind(self) -> BlockFunction:
        """Return the function that decodes a block."""
        return _decode_block


def _decode_block(block: pa.Table) -> pa.Table:
    for index, name in enumerate(block.column_names):
        decode = _DECODERS.get(name.rpartition(".")[2])
        if decode is None or name.startswith("__"):
            continue
        bodies = block.column(name).to_pylist()
        keys = block.column(KEY).to_pylist() if KEY in block.column_names else [name] * len(bodies)
        values = [
            None if body is None else _decode(decode, body, f"{key}.{name}")
            for body, key in zip(bodies, keys, strict=True)
        ]
        block = block.set_column(index, name, column_from_values(values, name=name))
    return block


def _decode(decode: Callable[[bytes], Any], body: bytes, name: str) -> Any:
    try:
        return decode(body)
    except (ValueError, OSError, EOFError) as error:
        raise ConfigError(
            f"The member {name} cannot be decoded: {error}",
            do="Correct the file, or pass decoder=None and decode the bytes in map_batches().",
        ) from error


def _decode_image(body: bytes) -> Any:
    return np.asarray(image_module().open(io.BytesIO(body)))


def _refuse_pickle(_body: bytes) -> Any:
    raise ValueError("it is a pickle, which may run code when it is loaded")


def _decode_msgpack(body: bytes) -> Any:
    import msgspec

    return msgspec.msgpack.decode(body)


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text"), lambda body: body.decode()),
    **dict.fromkeys(("cls", "cls2"), int),
    **dict.fromkeys(("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm"), _decode_image),
    "json": json.loads,
    "npy": lambda body: np.load(io.BytesIO(body), allow_pickle=False),
    "mp": _decode_msgpack,
    **dict.fromkeys(("pt", "pth", "pickle", "pkl"), _refuse_pickle),
}
