"""`cached_property` that takes no lock."""

from __future__ import annotations

import functools
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property  # noqa: TID251
else:

    class cached_property(functools.cached_property):  # noqa: N801, TID251 - a decorator
        """Without the lock of Python 3.11, which is one for all instances of a class.

        A value that is computed with the help of threads never comes, if one of them needs the same
        attribute of another instance. Without the lock two threads may both compute a value.
        """

        def __init__(self, func: Any) -> None:
            super().__init__(func)
            self.lock = nullcontext()
