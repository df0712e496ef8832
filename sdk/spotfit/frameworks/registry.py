"""Lookup of a framework by the name in the run's configuration."""

from __future__ import annotations

from spotfit.frameworks.framework import Framework, NoFramework
from spotfit.frameworks.jax.jax_config import JaxFramework
from spotfit.frameworks.lightgbm.lightgbm_config import LightGBMFramework
from spotfit.frameworks.tensorflow.tensorflow_config import TensorflowFramework
from spotfit.frameworks.torch.lightning_framework import LightningFramework
from spotfit.frameworks.torch.process_group import TorchFramework
from spotfit.frameworks.torch.torchft_config import TorchftFramework
from spotfit.frameworks.torch.xla_backend import TorchXlaFramework
from spotfit.frameworks.xgboost.xgboost_config import XGBoostFramework
from spotfit.host import plugins

ENTRY_POINT_GROUP = "spotfit.frameworks"
# Not entry points: looking those up reads the metadata of all installed distributions.
_BUILT_IN_FRAMEWORKS: dict[str, type[Framework]] = {
    "jax": JaxFramework,
    "lightgbm": LightGBMFramework,
    "lightning": LightningFramework,
    "none": NoFramework,
    "tensorflow": TensorflowFramework,
    "torch": TorchFramework,
    "torch_xla": TorchXlaFramework,
    "torchft": TorchftFramework,
    "xgboost": XGBoostFramework,
}


def open_framework(name: str) -> Framework:
    """Return a new instance of the framework with that name, such as "torch".

    Called in each worker and in the fork server; does not import the training library. Built-in
    frameworks take precedence over entry points of the group `spotfit.frameworks`. Raises
    `ConfigError` for an unknown name or an entry point that cannot be imported, and
    `MissingExtraError` if it lacks a dependency.
    """
    framework_class = _BUILT_IN_FRAMEWORKS.get(name) or plugins.load(ENTRY_POINT_GROUP, name)
    framework: Framework = framework_class()
    return framework
