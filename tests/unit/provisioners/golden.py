"""Golden files: the exact requests of a backend.

`WRITE_GOLDEN=1 pytest …` rewrites them; review the difference before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec


def check_golden(value: Any, path: Path) -> None:
    """Compare with the file, or write it."""
    body = msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2).decode() + "\n"
    if os.environ.get("WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
    assert body == path.read_text(), f"{path.name} differs; see golden.py"
