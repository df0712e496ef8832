"""TensorflowConfig and its framework: TF_CONFIG with the addresses of all ranks.

TensorFlow forms its group when the training function creates a strategy, and binds its port itself.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from spotfit.core.errors import MissingExtraError
from spotfit.core.input_checks import suggest_keywords
from spotfit.frameworks.backend_config import BackendConfig
from spotfit.frameworks.framework import AllGatherFn, rank_environment
from spotfit.host import env
from spotfit.host.plugins import require_module
from spotfit.protocol.worker_agent import StartWorker

LEGACY_KERAS_VARIABLE = "TF_USE_LEGACY_KERAS"
# `fit` of Keras 3 raises a ValueError under MultiWorkerMirroredStrategy.
_LEGACY_KERAS = "1"


@suggest_keywords
@dataclass
class TensorflowConfig(BackendConfig):
    """Configuration of TensorFlow's cluster, which has no settings."""

    @property
    def framework(self) -> str:
        """The name under which workers look up the framework: "tensorflow"."""
        return "tensorflow"

    def required_modules(self, env_vars: Mapping[str, str]) -> tuple[str, ...]:
        """Return the legacy Keras, or () if TF_USE_LEGACY_KERAS is 0.

        The variable is read in `env_vars`, else in this process.
        """
        # Not tensorflow: it has distributions of several names, which the run may install.
        text = env_vars.get(LEGACY_KERAS_VARIABLE) or env.lookup(LEGACY_KERAS_VARIABLE)
        return ("tf_keras",) if _is_legacy(text) else ()


def _is_legacy(text: str | None) -> bool:
    return (text or _LEGACY_KERAS).lower() in ("1", "true")  # as TensorFlow reads it


class TensorflowFramework:
    """Framework for TensorFlow: sets TF_CONFIG, which `MultiWorkerMirroredStrategy` reads."""

    preload_modules: tuple[str, ...] = (
        "numpy",
        "spotfit.frameworks.tensorflow.preload_tensorflow",
        "tf_keras",
    )
    # A strategy uses all GPUs that its process sees.
    sees_peer_devices = False
    # Collectives of all ranks fail if the process of one has ended.
    leaves_together = True

    def environment(self, start: StartWorker) -> dict[str, str]:
        """Return torchrun's rank variables, the visible devices and TF_USE_LEGACY_KERAS.

        The last one is 1 unless it is set. Raises `ConfigError` if the node has too few devices.
        """
        return {
            **rank_environment(start, sees_peer_devices=self.sees_peer_devices),
            LEGACY_KERAS_VARIABLE: env.lookup(LEGACY_KERAS_VARIABLE) or _LEGACY_KERAS,
        }

    def form_group(self, start: StartWorker, all_gather: AllGatherFn) -> None:
        """Choose a port of this rank and set TF_CONFIG with the addresses of all ranks.

        TensorFlow itself connects later. Raises `MissingExtraError` without tensorflow or, for the
        legacy Keras, tf-keras, and the exceptions of `all_gather`.
        """
        require_module("tensorflow", extra="tensorflow")
        if _is_legacy(env.lookup(LEGACY_KERAS_VARIABLE)):
            _require_legacy_keras()
        is_ipv6 = ":" in start.host
        # TensorFlow listens on all addresses: the port must be free on each.
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        # Reserved until all ranks know it. TensorFlow cannot take over the socket.
        with socket.create_server(("", 0), family=family) as reserved:
            host = f"[{start.host}]" if is_ipv6 else start.host
            address = f"{host}:{reserved.getsockname()[1]}"
            addresses = all_gather("tensorflow_cluster", address.encode())
        workers = [one.decode() for one in addresses]
        env.update({"TF_CONFIG": cluster_config(workers, index=start.rank)})

    def leave_group(self) -> None:
        """Do nothing: TensorFlow closes its connections when the process ends."""


def cluster_config(workers: Sequence[str], *, index: int) -> str:
    """Return the value of TF_CONFIG for the worker `index` of those at these addresses."""
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
    return msgspec.json.encode(config).decode()


def _require_legacy_keras() -> None:
    if importlib.util.find_spec("tf_keras") is None:
        raise MissingExtraError(
            "tf.keras of the workers is the legacy Keras, because Keras 3 cannot train on several "
            "workers with TensorFlow; its package tf-keras is not installed on this machine.",
            do="Install tf-keras on the machines, for example with "
            "RunConfig(worker_runtime_env={'pip': ['tf-keras']}). A function that does not call "
            f"Keras's fit() may set {LEGACY_KERAS_VARIABLE}=0 instead.",
            module="tf_keras",
        )
