"""The results of Ray Data in ray_batches.json, and their comparison with those of spotfit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from spotfit.data.dataset import Dataset
from spotfit.data.iteration.data_iterator import DataIterator
from spotfit.data.sources.tables import TableSource
from tests.unit.data.batch_cases import Call, result_of

RECORDED = json.loads(Path(__file__).with_name("ray_batches.json").read_text())


def is_as_in_ray(name: str, argument: Any, call: Call) -> bool:
    """Return whether a call with an iterator or a dataset has the result that is recorded for Ray.

    An error may have more built-in base classes than that of Ray.
    """
    result = json.loads(json.dumps(result_of(call, argument)))
    return _matches(result, RECORDED["cases"][name])


def iterator_of(table: pa.Table) -> DataIterator:
    """Return an iterator over the rows of a table."""
    return Dataset.of_source(TableSource(table)).iterator()


def _matches(result: Any, recorded: Any) -> bool:
    if isinstance(recorded, dict) and isinstance(result, dict) and recorded.keys() == result.keys():
        return all(
            set(classes) <= set(result[key]) if key.startswith("error") else classes == result[key]
            for key, classes in recorded.items()
        )
    return bool(result == recorded)
