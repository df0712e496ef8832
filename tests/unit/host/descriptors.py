"""A process without free file descriptors, for tests."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_free_descriptors(*, keep: int = 0) -> Iterator[None]:
    """Let this process open only `keep` more descriptors during the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The kernel gives the lowest free number, and refuses those from the limit on.
    probes = [os.dup(0) for _ in range(keep + 1)]
    limit = probes[-1]
    for descriptor in probes:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
