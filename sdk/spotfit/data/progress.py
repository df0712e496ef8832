"""Progress of passes over a dataset on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import TypeVar

from spotfit.data.context import DataContext

ItemT = TypeVar("ItemT")

_MIN_ITEMS = 8
"""A pass over fewer units is not worth a progress bar."""


def with_progress(items: Collection[ItemT], description: str) -> Iterator[ItemT]:
    """Yield the items, with a progress bar on standard error if that is a terminal.

    `DataContext.get_current().enable_progress_bars` disables it.
    """
    enabled = DataContext.get_current().enable_progress_bars and sys.stderr.isatty()
    if not enabled or len(items) < _MIN_ITEMS:
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description, console=Console(stderr=True), transient=True)
