"""The simulated bucket, and stores on it with latency, faults and request counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from spotfit.core.errors import AlreadyExistsError, NotFoundError, TransientStoreError
from spotfit.store.api import ObjectInfo, changed_error
from spotfit.store.local import body_version
from spotfit_localsim.virtual.engine import SimProcess, wall_ms
from spotfit_localsim.virtual.faults import CLIENT_TIMEOUT_S, FaultyConnection

WriteListener = Callable[[str, str, bytes | None, bytes | None], None]
"""Called for every change with the writer, the key, the old body and the new body (None: absent).
"""


class SimBucket:
    """The objects of the bucket. Listeners are called before another process can see a change."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.written_at_s: dict[str, float] = {}
        """When each object was written last, in virtual time."""
        self.clock: Callable[[], float] = lambda: 0.0
        self.requests: dict[str, Counter[str]] = {}
        self.listeners: list[WriteListener] = []

    def count_request(self, writer: str, kind: str) -> None:
        """Count one request."""
        self.requests.setdefault(writer, Counter())[kind] += 1

    def write(self, writer: str, key: str, body: bytes) -> None:
        """Create or replace an object."""
        before = self.objects.get(key)
        self.objects[key] = body
        self.written_at_s[key] = self.clock()
        for listener in self.listeners:
            listener(writer, key, before, body)

    def remove(self, writer: str, key: str) -> None:
        """Delete an object if it exists."""
        before = self.objects.pop(key, None)
        if before is not None:
            for listener in self.listeners:
                listener(writer, key, before, None)

    @property
    def total_requests(self) -> Counter[str]:
        """All requests by kind."""
        return sum(self.requests.values(), Counter())


class SimStore:
    """The `Store` of one process."""

    def __init__(
        self, bucket: SimBucket, process: SimProcess, connection: FaultyConnection, prefix: str = ""
    ) -> None:
        self._bucket = bucket
        self._process = process
        self._connection = connection
        self._prefix = prefix
        self._writer = process.name

    @property
    def url(self) -> str:
        return f"sim://{self._prefix}"

    def get(self, key: str) -> bytes:
        self._send_request("get")
        # Read between the two halves of the latency: the answer may be outdated on arrival.
        body = self._bucket.objects.get(self._prefix + key)
        self._receive_response()
        if body is None:
            raise NotFoundError(f"Object {key!r} does not exist.", do="List the prefix.")
        return self._connection.maybe_damage(body)

    def written_at_ms(self, key: str) -> int | None:
        """Return when the object was written, by the clock of the storage: the virtual time."""
        written_s = self._bucket.written_at_s.get(self._prefix + key)
        return None if written_s is None else wall_ms(written_s)

    def get_range(self, key: str, start: int, length: int, *, version: str = "") -> bytes:
        body = self.get(key)
        if version and body_version(body) != version:
            raise changed_error(f"Object {key!r}")
        return body[start : start + length]

    def head(self, key: str) -> ObjectInfo:
        """Return size and version of the object."""
        body = self.get(key)
        return ObjectInfo(key, len(body), body_version(body))

    def get_memoryview(self, key: str, scratch: memoryview) -> memoryview:
        return memoryview(self.get(key))

    def put(self, key: str, body: bytes | memoryview) -> None:
        self._call("put", partial(self._write, key, bytes(body)))

    def create(self, key: str, body: bytes) -> None:
        self._connection.maybe_deny_create()
        is_conflict = self._connection.reports_conflict()
        is_executed = not self._connection.reports_false_conflict() and (
            not is_conflict or self._connection.should_execute_conflict()
        )
        # Checked and written in one operation: creation is atomic in every supported bucket.
        created = self._call(
            "create",
            lambda: (
                is_executed
                and self._prefix + key not in self._bucket.objects
                and self._write(key, body)
            ),
        )
        if is_conflict:
            self.report_conflict(key)
        elif not created:
            raise AlreadyExistsError(f"{key!r} exists already.", do="Read it.")

    def report_conflict(self, key: str) -> None:
        """Raise the error for 409 ConditionalRequestConflict; wrong stores do something else."""
        raise TransientStoreError(
            f"ConditionalRequestConflict: a create of {key!r} was in progress.", do="Retry."
        )

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        self._send_request("list")
        root, objects = self._prefix + prefix, self._bucket.objects
        folder = f"{root.rstrip('/')}/" if root.strip("/") else ""
        keys = sorted(k for k in objects if k.startswith(folder) and k > self._prefix + after)
        # Sizes are taken before the response: objects may be deleted while it is on its way.
        found = [
            ObjectInfo(key[len(self._prefix) :], len(objects[key]), body_version(objects[key]))
            for key in keys
        ]
        self._receive_response()
        yield from found

    def delete(self, key: str) -> None:
        def remove() -> bool:
            self._bucket.remove(self._writer, self._prefix + key)
            return True

        self._call("delete", remove)

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def get_file(self, key: str, path: Path) -> None:
        path.write_bytes(self.get(key))

    def subtree(self, prefix: str) -> SimStore:
        folder = prefix if prefix.endswith("/") else f"{prefix}/"
        return type(self)(self._bucket, self._process, self._connection, self._prefix + folder)

    def _write(self, key: str, body: bytes) -> bool:
        self._bucket.write(self._writer, self._prefix + key, body)
        return True

    def _call(self, kind: str, operation: Callable[[], bool]) -> bool:
        self._send_request(kind, operation)
        result = operation()
        self._receive_response()
        return result

    def _send_request(self, kind: str, operation: Callable[[], bool] | None = None) -> None:
        # Counted before the faults: a failed request is billed as well.
        self._bucket.count_request(self._process.name, kind)
        self._process.simulate_call(self._connection.draw_latency_s())
        # Before the operation: nothing happened. After it (below), the caller cannot know.
        self._connection.maybe_lose_request()
        stalled_s = self._connection.draw_stall_s(self._process.engine.now)
        if stalled_s <= CLIENT_TIMEOUT_S:
            if stalled_s > 0:
                self._process.simulate_call(stalled_s)
            return
        if operation is not None and self._connection.should_execute_late():
            self._process.engine.schedule_after(stalled_s, operation)
        self._process.simulate_call(CLIENT_TIMEOUT_S)
        # The client cannot know whether the request will still be executed.
        raise TransientStoreError("The request timed out.", do="Read the object.")

    def _receive_response(self) -> None:
        self._process.simulate_call(self._connection.draw_latency_s())
        self._connection.maybe_lose_response()


class CheckThenPutStore(SimStore):
    """A wrong store for tests of the checker: `create` checks for the object, then writes it."""

    def create(self, key: str, body: bytes) -> None:
        self._send_request("create")
        exists = self._prefix + key in self._bucket.objects
        self._receive_response()
        if exists:
            raise AlreadyExistsError(f"{key!r} exists already.", do="Read it.")
        self.put(key, body)


class UnconditionalCreateStore(SimStore):
    """A wrong store for tests of the checker: `create` overwrites, as in a bucket without
    conditional
    writes.
    """

    def create(self, key: str, body: bytes) -> None:
        self.put(key, body)


class ConflictAsTakenStore(SimStore):
    """A wrong store for tests of the checker: it takes 409 for the answer of an existing object."""

    def report_conflict(self, key: str) -> None:
        raise AlreadyExistsError(f"{key!r} exists already.", do="Read it.")


class ConflictAsWrittenStore(SimStore):
    """A wrong store for tests of the checker: it takes 409 for success."""

    def report_conflict(self, key: str) -> None:
        """Return as if the object had been written."""
