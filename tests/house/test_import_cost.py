"""`import spotfit` is cheap and imports no heavy dependency."""

import json
import subprocess
import sys

import pytest

ALLOWED_CPU_S = 0.100
HEAVY_MODULES = {
    "asyncio",
    "boto3",
    "botocore",
    "cloudpickle",
    "cryptography",
    "fsspec",
    "moto",
    "msgspec",
    "numpy",
    "obstore",
    "pyarrow",
    "rich",
    "sklearn",
    "torch",
    "typer",
}

PROBE = """
import json, sys, time
before = time.process_time()
import {module}
print(json.dumps([time.process_time() - before, sorted(m for m in sys.modules if "." not in m)]))
"""


@pytest.fixture(scope="module")
def imports() -> list[tuple[float, set[str]]]:
    """CPU seconds and top-level modules of `import spotfit` in five new interpreters."""
    return [fresh_import("spotfit") for _ in range(5)]


def test_import_spotfit_imports_nothing_heavy(imports: list[tuple[float, set[str]]]) -> None:
    heavy_imports = imports[0][1] & HEAVY_MODULES
    assert not heavy_imports, f"`import spotfit` imports {sorted(heavy_imports)}"


def test_import_spotfit_is_fast(imports: list[tuple[float, set[str]]]) -> None:
    best = min(cost for cost, _ in imports)
    assert best <= ALLOWED_CPU_S, f"`import spotfit` takes {best * 1000:.0f} ms of CPU"


def fresh_import(module: str) -> tuple[float, set[str]]:
    result = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)],
        capture_output=True,
        text=True,
        check=True,
    )
    cost, modules = json.loads(result.stdout)
    return cost, set(modules)
