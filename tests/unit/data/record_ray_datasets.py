"""Record the results of operations of Ray Data, as ray_datasets.json beside this file.

Run by the environment of Ray, from the root of the repository; Ray's joins need polars:

    python -m venv .bench/venv-ray
    .bench/venv-ray/bin/pip install "ray[data]==2.60.0" polars
    .bench/venv-ray/bin/python -m tests.unit.data.record_ray_datasets
"""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import ray
import ray.data

from tests.unit.data.dataset_cases import cases, result_of

TABLE = Path(__file__).with_name("ray_datasets.json")


def main() -> None:
    warnings.simplefilter("ignore")
    ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    recorded = {name: result_of(case) for name, case in cases(ray.data).items()}
    # One case per line: the file is read by people when a case differs.
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in recorded.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(recorded)} cases of Ray {ray.__version__} in {TABLE}")


if __name__ == "__main__":
    main()
