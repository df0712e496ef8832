"""Public names of a package that import their modules on first use; classes that may be missing.

A package of a framework must not import the framework: its trainers are used where it is missing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from spotfit.core.unsupported_names import missing_attribute_error


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of the package (PEP 562).

    `modules` has the module of each public name. `__getattr__` imports it and stores the value in
    the package, so that later accesses do not call it. Raises what `missing_attribute_error`
    returns for names that the package does not have.
    """

    def get_name(name: str) -> Any:
        if name not in modules:
            raise missing_attribute_error(package, name)
        value = getattr(importlib.import_module(modules[name]), name)
        vars(sys.modules[package])[name] = value
        return value

    def list_names() -> list[str]:
        # Without the imports of the package, which would be offered as completions.
        special = (name for name in vars(sys.modules[package]) if name.startswith("__"))
        return sorted({*special, *modules})

    return get_name, list_names


def is_loaded_instance(value: Any, module: str, *names: str) -> bool:
    """Return whether `value` is an instance of one of these classes of a module.

    The module is not imported: without it there are no instances.
    """
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, tuple(getattr(loaded, one) for one in names))
