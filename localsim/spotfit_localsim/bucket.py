"""One bucket for the whole world, and stores over it with latency, faults and a bill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from spotfit.core.errors import AlreadyExistsError, NotFoundError, TransientStoreError
from spotfit.store.api import ObjectInfo
from spotfit_localsim.engine import Process
from spotfit_localsim.faults import GIVES_UP_S, Line

Written = Callable[[str, str, bytes | None, bytes | None], None]
"""Told of every change: who, key, what was there before, what is there now (None: nothing)."""


class Bucket:
    """The objects as they are. Changes are told, before anybody else can see them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: dict[str, Counter[str]] = {}
        self.watchers: list[Written] = []

    def count(self, who: str, kind: str) -> None:
        """One more request on the bill."""
        self.requests.setdefault(who, Counter())[kind] += 1

    def write(self, who: str, key: str, body: bytes) -> None:
        """Set an object, whatever was there."""
        before = self.objects.get(key)
        self.objects[key] = body
        for told in self.watchers:
            told(who, key, before, body)

    def remove(self, who: str, key: str) -> None:
        """Delete an object that may be gone already."""
        before = self.objects.pop(key, None)
        if before is not None:
            for told in self.watchers:
                told(who, key, before, None)

    @property
    def bill(self) -> Counter[str]:
        """All requests by kind, whoever made them."""
        return sum(self.requests.values(), Counter())


class SimStore:
    """A `Store` as one process of the world uses it."""

    def __init__(self, bucket: Bucket, process: Process, line: Line, prefix: str = "") -> None:
        self._bucket = bucket
        self._process = process
        self._line = line
        self._prefix = prefix

    @property
    def url(self) -> str:
        return f"sim://{self._prefix}"

    def get(self, key: str) -> bytes:
        self._go("get")
        body = self._bucket.objects.get(self._prefix + key)
        self._come_back()
        if body is None:
            raise NotFoundError(f"There is no object {key!r}.", do="Look at the listing.")
        return body

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def view(self, key: str, spare: memoryview) -> memoryview:
        return memoryview(self.get(key))

    def put(self, key: str, body: bytes | memoryview) -> None:
        self._do("put", partial(self._write, key, bytes(body)))

    def create(self, key: str, body: bytes) -> None:
        won = self._do("create", partial(self._write_if_absent, key, body))
        if not won:
            raise AlreadyExistsError(f"{key!r} is there already.", do="Read it.")

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        self._go("list")
        found = self._listing(self._prefix + prefix, self._prefix + after)
        self._come_back()
        yield from found

    def delete(self, key: str) -> None:
        self._do("delete", partial(self._remove, key))

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def get_file(self, key: str, path: Path) -> None:
        path.write_bytes(self.get(key))

    def under(self, prefix: str) -> SimStore:
        folder = prefix if prefix.endswith("/") else f"{prefix}/"
        return type(self)(self._bucket, self._process, self._line, self._prefix + folder)

    def _write(self, key: str, body: bytes) -> bool:
        self._bucket.write(self._process.name, self._prefix + key, body)
        return True

    def _write_if_absent(self, key: str, body: bytes) -> bool:
        return self._prefix + key not in self._bucket.objects and self._write(key, body)

    def _remove(self, key: str) -> bool:
        self._bucket.remove(self._process.name, self._prefix + key)
        return True

    def _do(self, kind: str, deed: Callable[[], bool]) -> bool:
        self._go(kind, deed)
        done = deed()
        self._come_back()
        return done

    def _go(self, kind: str, deed: Callable[[], bool] | None = None) -> None:
        self._bucket.count(self._process.name, kind)
        self._process.touch(self._line.latency_s())
        self._line.before()
        stalled_s = self._line.stalled_s(self._process.engine.now)
        if stalled_s > 0:
            self._stall(stalled_s, deed)

    def _stall(self, seconds: float, deed: Callable[[], bool] | None) -> None:
        """The request hangs: it is carried out late, perhaps after who sent it has given up."""
        if seconds <= GIVES_UP_S:
            self._process.touch(seconds)
            return
        if deed is not None and self._line.arrives_late():
            self._process.engine.after(seconds, partial(_carry_out, deed))
        self._process.touch(GIVES_UP_S)
        raise TransientStoreError("There was no answer in time.", do="Read what is there.")

    def _come_back(self) -> None:
        self._process.touch(self._line.latency_s())
        self._line.behind()

    def _listing(self, prefix: str, after: str) -> Sequence[ObjectInfo]:
        objects = self._bucket.objects
        folder = f"{prefix.rstrip('/')}/" if prefix.strip("/") else ""
        keys = sorted(key for key in objects if key.startswith(folder) and key > after)
        return [ObjectInfo(key[len(self._prefix) :], len(objects[key])) for key in keys]


def _carry_out(deed: Callable[[], bool]) -> None:
    """Nobody waits for the answer."""
    deed()


class ChecksThenWrites(SimStore):
    """Known to be wrong: looks whether the object exists, then writes it."""

    def create(self, key: str, body: bytes) -> None:
        self._go("create")
        exists = self._prefix + key in self._bucket.objects
        self._come_back()
        if exists:
            raise AlreadyExistsError(f"{key!r} is there already.", do="Read it.")
        self.put(key, body)


class IgnoresCreate(SimStore):
    """Known to be wrong: takes `create` for `put`, as a bucket that ignores conditions does."""

    def create(self, key: str, body: bytes) -> None:
        self.put(key, body)
