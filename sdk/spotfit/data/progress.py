"""Progress of passes over a dataset on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

from spotfit.data.context import DataContext

ItemT = TypeVar("ItemT")

_MIN_BYTES = 64 * 2**20
"""Fewer bytes are read at once."""
_MIN_ITEMS = 8
"""A pass over fewer units is not worth a progress bar."""


def with_progress(items: Collection[ItemT], description: str) -> Iterator[ItemT]:
    """Yield the items, with a progress bar on standard error if that is a terminal.

    `DataContext.get_current().enable_progress_bars` disables it.
    """
    if not _is_shown() or len(items) < _MIN_ITEMS:
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description, console=Console(stderr=True), transient=True)


@contextmanager
def byte_progress(total_bytes: int, description: str) -> Iterator[Callable[[int], None]]:
    """Yield a function for any thread that takes how many further bytes are done.

    Shows a progress bar as `with_progress` does.
    """
    if not _is_shown() or total_bytes < _MIN_BYTES:
        yield lambda _size_bytes: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total_bytes)
        yield lambda size_bytes: bar.advance(task, size_bytes)


def _is_shown() -> bool:
    return DataContext.get_current().enable_progress_bars and sys.stderr.isatty()
