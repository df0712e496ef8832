"""`AuthenticatedStore`: the store of a run in a process that holds the run key.

It adds a MAC to the objects that decisions depend on when it writes them, and verifies it when it
reads them. Journal entries are not among them: `ledger.journal` authenticates these itself, because
their MACs form a chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from spotfit.core.errors import IntegrityError
from spotfit.host import log
from spotfit.ledger import keys
from spotfit.security.object_mac import ObjectMac
from spotfit.security.run_key import RunKey
from spotfit.store.api import ObjectInfo, Store
from spotfit.store.storage_time import written_at_ms

MAX_READS = 5
"""How often an object is read until it has a valid MAC, before it counts as not authentic."""
_AUTHENTICATED_PREFIXES = (
    keys.VIEWS,
    keys.LEASES,
    keys.MEMBERS,
    keys.STANDBY,
    keys.CRASHES,
    keys.MANIFESTS,
    keys.REPORTS,
    keys.CALLBACKS,
)


class AuthenticatedStore:
    """The store at a run's root, with MACs on the objects that decisions depend on.

    They are cached views, leases, members, reports of agents that stand by, crashes, manifests,
    name markers, and the reports and the progress of callbacks. `get` of such an object raises
    `IntegrityError` if its MAC is missing or wrong, and returns the body with the MAC otherwise:
    decode `strip_mac(body)`. Other methods and objects behave as those of `store`.
    `subtree` and pickling give the plain store, without the key.
    """

    def __init__(self, store: Store, key: RunKey) -> None:
        self._store = store
        self.key = key
        self.mac = ObjectMac(key)
        self._reported: set[str] = set()

    def __reduce__(self) -> tuple[object, ...]:
        # Checkpoints hold their store, and user code pickles them to any place.
        return (_plain_store, (self._store,))

    @property
    def plain_store(self) -> Store:
        """The store without authentication."""
        return self._store

    @property
    def url(self) -> str:
        return self._store.url

    def get(self, key: str) -> bytes:
        # Answers may have been damaged in transit. Leases are read every second, therefore fewer
        # times if the object is known to be invalid.
        for _ in range(1 if key in self._reported else MAX_READS):
            body = self._store.get(key)
            if not _is_authenticated(key) or self.mac.is_valid(key, body):
                return body
        error = IntegrityError(
            f"{key} in {self.url} is not authentic: its MAC is missing or wrong.",
            do="Check who else can write to the storage of the run.",
            object=key,
        )
        # Once per object: leases are read every second.
        if key not in self._reported:
            self._reported.add(key)
            log.warning("object.not_authentic", key=key, url=self.url)
        raise error

    def put(self, key: str, body: bytes | memoryview) -> None:
        self._store.put(key, self.mac.add(key, bytes(body)) if _is_authenticated(key) else body)

    def create(self, key: str, body: bytes) -> None:
        self._store.create(key, self.mac.add(key, body) if _is_authenticated(key) else body)

    def written_at_ms(self, key: str) -> int | None:
        return written_at_ms(self._store, key)

    def get_range(
        self, key: str, start: int, length: int, *, version: str = ""
    ) -> bytes | memoryview:
        return self._store.get_range(key, start, length, version=version)

    def head(self, key: str) -> ObjectInfo:
        return self._store.head(key)

    def get_memoryview(self, key: str, scratch: memoryview) -> memoryview:
        return self._store.get_memoryview(key, scratch)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        return self._store.list(prefix, after=after)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def put_file(self, key: str, path: Path) -> None:
        self._store.put_file(key, path)

    def get_file(self, key: str, path: Path) -> None:
        self._store.get_file(key, path)

    def subtree(self, prefix: str) -> Store:
        return self._store.subtree(prefix)


def _is_authenticated(key: str) -> bool:
    return key.startswith(_AUTHENTICATED_PREFIXES)


def _plain_store(store: Store) -> Store:
    return store
