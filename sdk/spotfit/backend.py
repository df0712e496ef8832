"""Public module `spotfit.backend`: hooks that run around the training function on every worker."""

from __future__ import annotations

from spotfit.frameworks.backend_config import Backend, BackendConfig

__all__ = ["Backend", "BackendConfig"]
