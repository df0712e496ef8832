"""Record what Ray gives for the cases of `ray_cases.py`, into `ray_outputs.json`.

python -m venv venv-ray
venv-ray/bin/pip install "ray[data]==2.60.0" scikit-learn datasketches
venv-ray/bin/python tests/unit/data/preprocessors/record_ray_outputs.py
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from tests.unit.data.preprocessors import ray_cases

OUTPUTS = Path(__file__).with_name("ray_outputs.json")


def main() -> None:
    """Run all cases, each with the statistics, the transformed test rows, or the error."""
    ray = importlib.import_module("ray")
    importlib.import_module("ray.data.preprocessors")

    # More than the machine has: each operator of Ray Data reserves a CPU.
    ray.init(num_cpus=8, include_dashboard=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    names = sys.argv[1:] or list(ray_cases.CASES)
    recorded = json.loads(OUTPUTS.read_text()) if sys.argv[1:] else {}
    for name in names:
        recorded[name] = run(ray.data, ray_cases.CASES[name])
        OUTPUTS.write_text(json.dumps(recorded, indent=1) + "\n")
        print(name, recorded[name].get("error", ""), flush=True)


def run(data: Any, case: ray_cases.Case) -> dict[str, Any]:
    """Return the outputs of Ray for a case."""
    first = ray_cases.FIRST_BLOCK_ROWS
    train = data.from_arrow([ray_cases.TRAIN.slice(0, first), ray_cases.TRAIN.slice(first)])
    test = data.from_arrow(ray_cases.TEST)
    try:
        preprocessor = case.create(data.preprocessors)
        preprocessor.fit(train)
        tables = [pa.table(block) for block in iterate(preprocessor.transform(test))]
    except Exception as error:  # noqa: BLE001 - the error is the recorded result
        lines = f"{type(error).__name__}: {error}".splitlines()
        # Of an error in a task, the last such line is that of the original exception.
        named = [line for line in lines if re.match(r"(\w+\.)*\w+(Error|Exception): ", line)]
        return {"error": named[-1][:200]}
    table = pa.concat_tables(tables)
    return {
        "stats": plain(getattr(preprocessor, "stats_", {})),
        "columns": {name: plain(table[name].to_pylist()) for name in case.outputs},
        "types": {name: str(table.schema.field(name).type) for name in case.outputs},
    }


def iterate(dataset: Any) -> Any:
    """Yield the blocks of a dataset as Arrow tables."""
    return dataset.iter_batches(batch_format="pyarrow", batch_size=None)


def plain(value: Any) -> Any:
    """Return values for JSON, with dictionaries as pairs, so that keys keep their types."""
    if isinstance(value, dict):
        return [[plain(key), plain(element)] for key, element in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(element) for element in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, pd.CategoricalDtype):
        return [plain(list(value.categories)), bool(value.ordered)]
    if value is pd.NA:
        return None
    return value.item() if isinstance(value, np.generic) else value


if __name__ == "__main__":
    main()
