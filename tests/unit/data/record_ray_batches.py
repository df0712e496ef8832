"""Record what batches of Ray Data are, as ray_batches.json beside this file.

Run by the environment of Ray, from the root of the repository:

    python -m venv .bench/venv-ray
    .bench/venv-ray/bin/pip install -c constraints.txt -c .ci/jax.txt -c .ci/tensorflow.txt \
        "ray[data,train]==2.60.0" torch==2.13.0 jax tensorflow-cpu
    XLA_FLAGS=--xla_force_host_platform_device_count=2 .bench/venv-ray/bin/python \
        -m tests.unit.data.record_ray_batches
"""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data

from tests.unit.data.batch_cases import (
    METHODS,
    ROWS,
    argument_calls,
    column_calls,
    columns,
    jax_calls,
    numbers_table,
    output_call,
    outputs,
    parameters,
    tensorflow_calls,
    tensorflow_column_calls,
    tensorflow_table,
)
from tests.unit.data.batch_cases import result_of as result

TABLE = Path(__file__).with_name("ray_batches.json")


def main() -> None:
    warnings.simplefilter("ignore")
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # Otherwise prefetched batches are returned in the order in which they are ready.
    context.execution_options.preserve_order = True
    recorded: dict[str, Any] = {
        f"{column}: {name}": result(call, ray.data.from_arrow(pa.table({"c": array})).iterator())
        for column, array in columns().items()
        for name, call in (column_calls() | tensorflow_column_calls()).items()
    }
    for name, value in outputs().items():
        recorded[f"output: {name}"] = result(
            output_call(value), ray.data.range(ROWS, override_num_blocks=1)
        )
    table = numbers_table()
    for name, call in argument_calls(ray.data.collate_fn).items():
        recorded[name] = result(call, ray.data.from_arrow(table).iterator())
    for name, call in tensorflow_calls().items():
        recorded[name] = result(call, ray.data.from_arrow(tensorflow_table()).iterator())
    for name, call in jax_calls(ray.data.collate_fn).items():
        recorded[name] = result(call, ray.data.from_arrow(table).iterator())
    methods = {name: parameters(ray.data.DataIterator, name) for name in METHODS}
    # One case per line: the file is read by people when a case differs.
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in recorded.items()]
    content = {"ray": ray.__version__, "methods": methods, "cases": "CASES"}
    text = json.dumps(content, indent=1).replace('"CASES"', "{\n" + ",\n".join(lines) + "\n}")
    TABLE.write_text(text + "\n")
    print(f"{len(recorded)} cases of Ray {ray.__version__} in {TABLE}")


if __name__ == "__main__":
    main()
