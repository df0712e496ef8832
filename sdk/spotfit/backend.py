"""Hooks around the training function: `Backend`, and the `BackendConfig` that names it."""

from __future__ import annotations

from spotfit.frameworks.config import Backend, BackendConfig

__all__ = ["Backend", "BackendConfig"]
