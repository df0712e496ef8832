"""Datasets for training: `import spotfit.data`, with the names of `ray.data`.

Importing this package must not import NumPy or PyArrow; each name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfit.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from spotfit.data.data_iterator import DataIterator as DataIterator
    from spotfit.data.dataset import Dataset as Dataset
    from spotfit.data.readers import from_items as from_items
    from spotfit.data.readers import range as range  # noqa: A004 - the name of Ray
    from spotfit.data.source import Source as Source

_MODULES = {
    "DataIterator": "spotfit.data.data_iterator",
    "Dataset": "spotfit.data.dataset",
    "Source": "spotfit.data.source",
    "from_items": "spotfit.data.readers",
    "range": "spotfit.data.readers",
}

__all__ = [
    "DataIterator",
    "Dataset",
    "Source",
    "from_items",
    "range",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
