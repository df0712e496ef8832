"""Statistics of earlier fits, found by the rows, the class and the parameters.

In this process, and in the bucket where `Dataset.fits_path` says so: a driver that starts again
reads them instead of the dataset. They are JSON, as preprocessors in checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from copy import deepcopy
from typing import Any, Protocol

from spotfit.core.cached import cached_property
from spotfit.core.errors import ConfigError, NotFoundError, StoreError
from spotfit.data.dataset import Dataset
from spotfit.data.operations.writers import open_folder
from spotfit.data.preprocessors import preprocessor_json
from spotfit.host import log
from spotfit.store.api import Store

_FOLDER = "_fits"
"""Readers of files skip names that begin with "_"."""
_MAX_FITS = 1000
"""Fits that a process holds. Most are a few numbers; vocabularies are larger."""


class _Preprocessor(Protocol):
    """A preprocessor; its class is above this module."""

    stats_: dict[str, Any]
    _fitted: bool


class _RecentFits:
    """Statistics by key, in this process. Thread-safe; the least recently used are dropped.

    Values are copied: preprocessors may change theirs.
    """

    def __init__(self) -> None:
        self._fits: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> dict[str, Any] | None:
        with self._lock:
            if key in self._fits:
                self._fits.move_to_end(key)
            found = self._fits.get(key)
        return deepcopy(found)

    def put(self, key: str, statistics: dict[str, Any]) -> None:
        copied = deepcopy(statistics)
        with self._lock:
            self._fits[key] = copied
            if len(self._fits) > _MAX_FITS:
                self._fits.popitem(last=False)


_recent = _RecentFits()


class FitCache:
    """Fits to the rows of one dataset.

    Only of rows that are read from files: for others, a hash would take longer than the fit. Errors
    of the bucket are logged, and the fit is computed.
    """

    def __init__(self, ds: Dataset) -> None:
        self._dataset = ds

    def restore(self, preprocessor: _Preprocessor) -> bool:
        """Set the statistics of an earlier fit, and return True; False if there is none."""
        key = self._key(preprocessor)
        if key is None:
            return False
        found = _recent.get(key)
        if found is None:
            found = self._read(key)
            if found is None:
                return False
            _recent.put(key, found)
        preprocessor.stats_ = found
        preprocessor._fitted = True  # noqa: SLF001 - the stored form of the class
        log.debug("data.fit_restored", preprocessor=repr(preprocessor))
        return True

    def store(self, preprocessor: _Preprocessor) -> None:
        """Store the statistics of a fit."""
        key = self._key(preprocessor)
        if key is None:
            return
        _recent.put(key, preprocessor.stats_)
        if self._folder is None:
            return
        try:
            self._folder.put(f"{key}.json", preprocessor_json.dump(preprocessor).encode())
        except (ConfigError, StoreError, OSError) as error:
            _warn(error)

    def _read(self, key: str) -> dict[str, Any] | None:
        if self._folder is None:
            return None
        try:
            loaded = preprocessor_json.load(self._folder.get(f"{key}.json"))
        except (NotFoundError, FileNotFoundError):
            return None
        except (ConfigError, StoreError, OSError) as error:
            _warn(error)
            return None
        statistics: dict[str, Any] = loaded.stats_
        return statistics

    def _key(self, preprocessor: _Preprocessor) -> str | None:
        """Return the hash of rows, class and parameters; None if one is unknown."""
        if self._content is None:
            return None
        try:
            fields = preprocessor_json.to_fields(preprocessor)
        except ConfigError:
            return None  # with functions of the user
        content = [self._content, fields["class"], fields["parameters"]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @cached_property
    def _content(self) -> str | None:
        return self._dataset.content_digest() if self._dataset.reads_files else None

    @cached_property
    def _folder(self) -> Store | None:
        path = self._dataset.fits_path
        return None if path is None else open_folder(path).subtree(_FOLDER)


def _warn(error: Exception) -> None:
    log.warning("data.fit_not_stored", reason=f"{type(error).__name__}: {error}")
