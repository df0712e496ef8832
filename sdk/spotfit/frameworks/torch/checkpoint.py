"""TorchCheckpoint: a checkpoint with a model of torch in `model.pt`. A leftover of old scripts."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from spotfit.core.errors import ConfigError, NotFoundError
from spotfit.frameworks.checkpoint import FrameworkCheckpoint, deprecated

if TYPE_CHECKING:
    import torch


class NoModelError(NotFoundError, RuntimeError):
    """The checkpoint has no file of a model."""


class TorchCheckpoint(FrameworkCheckpoint):
    """A checkpoint that keeps the weights of a model, or a whole model, in `model.pt`.

    Deprecated: put files of your own into a `spotfit.Checkpoint`.
    """

    MODEL_FILENAME = "model.pt"

    @classmethod
    def from_state_dict(cls, state_dict: dict[str, Any], *, preprocessor: Any = None) -> Self:
        """A checkpoint of these weights, in a new temporary directory.

        Their names lose the 'module.' that DistributedDataParallel puts before them.
        """
        return cls._of(_without_wrapper(state_dict), preprocessor)

    @classmethod
    def from_model(cls, model: torch.nn.Module, *, preprocessor: Any = None) -> Self:
        """A checkpoint of a whole model, pickled, in a new temporary directory.

        Deprecated: whoever loads it runs what is in it. Prefer `from_state_dict`.
        """
        deprecated("TorchCheckpoint.from_model pickles the model: use from_state_dict.")
        return cls._of(model, preprocessor)

    def get_model(self, model: torch.nn.Module | None = None) -> torch.nn.Module:
        """The model, on the CPU: `model` filled with the weights that are kept, or the one kept.

        It is unpickled, which can run any code: only ask a checkpoint whose origin you trust.
        Raises `NoModelError`, which is a RuntimeError, and `ConfigError`, a ValueError.
        """
        import torch

        kept = self._kept()
        if isinstance(kept, torch.nn.Module):
            if model is not None:
                warnings.warn("The checkpoint has its own model: yours is not used.", stacklevel=2)
            return kept
        if not isinstance(kept, dict):
            raise ConfigError(
                f"{self.MODEL_FILENAME} holds a {type(kept).__name__}, neither weights nor model.",
                do="Make it with TorchCheckpoint.from_state_dict(model.state_dict()).",
            )
        if model is None:
            raise ConfigError(
                f"{self} keeps weights only, and no model was given to fill with them.",
                do="Call get_model(model) with a model of the same shape.",
            )
        model.load_state_dict(kept)
        return model

    @classmethod
    def _of(cls, kept: Any, preprocessor: Any) -> Self:
        import torch

        directory = tempfile.mkdtemp()
        torch.save(kept, Path(directory, cls.MODEL_FILENAME))
        self = cls.from_directory(directory)
        if preprocessor:
            self.set_preprocessor(preprocessor)
        return self

    def _kept(self) -> Any:
        import torch

        with self.as_directory() as directory:
            path = Path(directory, self.MODEL_FILENAME)
            if not path.exists():
                raise NoModelError(
                    f"{self} has no {self.MODEL_FILENAME}.",
                    do="Make it with TorchCheckpoint.from_state_dict(model.state_dict()).",
                )
            return torch.load(path, map_location="cpu", weights_only=False)


def _without_wrapper(state_dict: dict[str, Any]) -> dict[str, Any]:
    from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

    plain = OrderedDict(state_dict)
    if (versions := getattr(state_dict, "_metadata", None)) is not None:
        vars(plain)["_metadata"] = copy.copy(versions)
    consume_prefix_in_state_dict_if_present(plain, "module.")
    return plain
