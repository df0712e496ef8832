"""Print the table of Ray Train's API; needs `ray[train]` of that version, and the frameworks.

    .bench/venv-ray/bin/python -m tests.parity.make_table > tests/parity/ray_train_2_60.json

`make parity` does so, and compares the output with the stored table.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from typing import Any
from unittest.mock import MagicMock

from tests.parity.describe import describe_all
from tests.parity.scope import CONSTANTS, ENVIRONMENT, EXAMPLES, RAY_MODULES, RAY_VERSION, VARIABLE

HOROVOD_MODULES = (
    *("horovod", "horovod.ray", "horovod.ray.runner", "horovod.ray.utils"),
    *("horovod.runner", "horovod.runner.common", "horovod.runner.common.util"),
)


def main() -> None:
    version = importlib.import_module("ray").__version__
    if version != RAY_VERSION:
        raise SystemExit(f"The table is about Ray {RAY_VERSION}; here is {version}.")
    warnings.simplefilter("ignore")
    # Horovod cannot be installed any more, and Ray's module only imports it.
    sys.modules.update({name: MagicMock() for name in HOROVOD_MODULES})
    print("{")
    for module in RAY_MODULES:
        print(f"{json.dumps(module)}: {{\n{_lines(module)}\n}},")
    print(f"{json.dumps(ENVIRONMENT)}: {json.dumps(_variables(), indent=1)}")
    print("}")


def _lines(module: str) -> str:
    """One line per name, so that changes in Ray are changed lines."""
    return ",\n".join(
        f" {json.dumps(name)}: {json.dumps(facts)}" for name, facts in _module(module).items()
    )


def _module(name: str) -> dict[str, Any]:
    module = importlib.import_module(name)
    names = RAY_MODULES[name] or module.__all__
    return describe_all({one: getattr(module, one) for one in names}, EXAMPLES)


def _variables() -> list[str]:
    """Return the names of Ray's environment variables."""
    modules = map(importlib.import_module, CONSTANTS)
    texts = {text for module in modules for text in vars(module).values() if isinstance(text, str)}
    return sorted(text for text in texts if VARIABLE.fullmatch(text))


if __name__ == "__main__":
    main()
