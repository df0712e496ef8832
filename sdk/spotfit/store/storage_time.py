"""The clock of the storage, which all processes of a run share.

Wall clocks of machines differ. The storage records when it has received an object: the difference
to this machine's clock is added to this machine's time.
"""

from __future__ import annotations

from collections.abc import Callable

from spotfit.core.errors import NotFoundError
from spotfit.store.api import Store

# Times of S3 and others are rounded to seconds, and requests take up to some seconds. Clocks of
# machines that are synchronized differ by less.
_TOLERANCE_MS = 2000


def measure_offset_ms(
    store: Store, key: str, write: Callable[[], None], wall_ms: Callable[[], int]
) -> int:
    """Write an object, and return how far the storage's clock is ahead of this machine's, in ms.

    `write` writes the object `key`; `wall_ms` is this machine's clock. Negative if it is behind; 0
    for differences of less than two seconds, and for a storage without times. Raises the storage's
    errors.
    """
    before_ms = wall_ms()
    write()
    after_ms = wall_ms()
    written_ms = written_at_ms(store, key)
    if written_ms is None:
        return 0
    offset_ms = written_ms - (before_ms + after_ms) // 2
    tolerance_ms = _TOLERANCE_MS + (after_ms - before_ms) // 2
    return 0 if abs(offset_ms) <= tolerance_ms else offset_ms


def written_at_ms(store: Store, key: str) -> int | None:
    """Return when the object was written, by the storage's clock in ms since 1970.

    None if the storage does not tell, or has no such object.
    """
    # Not a part of the protocol: file systems of users need not record it.
    method = getattr(store, "written_at_ms", None)
    if method is None:
        return None
    try:
        written_ms: int | None = method(key)
    except NotFoundError:
        return None
    return written_ms
