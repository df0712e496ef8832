"""DeepSpeed's optional extension for collectives on the CPU, which is not used in workers."""

from __future__ import annotations

import importlib
from types import ModuleType

from spotfit.core.errors import MissingExtraError

_SHARED_MEMORY_OP = "deepspeed_shm_comm"


def import_deepspeed() -> ModuleType:
    """Return deepspeed, which will use the collectives of torch only.

    On machines without GPUs DeepSpeed would compile an extension with shared memory for the ranks
    of one machine, when a group is first used. That takes minutes on each new machine, and a
    process that is killed meanwhile leaves a lock for which later processes wait without a limit.
    Raises `MissingExtraError` without deepspeed.
    """
    try:
        deepspeed = importlib.import_module("deepspeed")
        ops = importlib.import_module("deepspeed.ops")
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"spotfit.deepspeed needs the package {missing.name!r}, which is not installed.",
            # Its setup imports torch, so that no extra can install both.
            do="Run `pip install torch setuptools wheel`, then `DS_BUILD_OPS=0 pip install "
            "--no-build-isolation deepspeed`; on the machines as well.",
            module=missing.name,
        ) from missing
    # DeepSpeed has no option for it.
    ops.__compatible_ops__[_SHARED_MEMORY_OP] = False
    return deepspeed
