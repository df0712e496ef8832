"""Public module `spotfit.huggingface.transformers`: the names of Ray Train's module of that name.

Importing this module must not import transformers: `spotfit migrate` reads its names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import spotfit.huggingface

if TYPE_CHECKING:
    from spotfit.huggingface import RayTrainReportCallback as RayTrainReportCallback
    from spotfit.huggingface import prepare_trainer as prepare_trainer

__all__ = ["RayTrainReportCallback", "prepare_trainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(spotfit.huggingface, name)
