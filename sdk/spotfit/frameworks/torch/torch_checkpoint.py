"""TorchCheckpoint: a checkpoint with a torch model in `model.pt`, as in earlier Ray Train APIs."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from spotfit.core.errors import ConfigError, NotFoundError
from spotfit.frameworks.framework_checkpoint import FrameworkCheckpoint, warn_deprecated

if TYPE_CHECKING:
    import torch

_REMEDY = "Create the checkpoint with TorchCheckpoint.from_state_dict(model.state_dict())."


class NoModelError(NotFoundError, RuntimeError):
    """The checkpoint contains no model file."""


class TorchCheckpoint(FrameworkCheckpoint):
    """A checkpoint that stores a state dict, or a whole pickled model, in `model.pt`.

    Deprecated: store your own files in a `spotfit.Checkpoint`.
    """

    MODEL_FILENAME = "model.pt"

    @classmethod
    def from_state_dict(cls, state_dict: dict[str, Any], *, preprocessor: Any = None) -> Self:
        """Create a checkpoint of a state dict, as `model.pt` in a new temporary directory.

        The directory stays unless a report deletes it after the upload. The prefix 'module.' that
        DistributedDataParallel adds to names is removed. `preprocessor` is pickled into the
        metadata; None for none.
        """
        from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

        stripped = OrderedDict(state_dict)
        # An OrderedDict copy loses torch's attribute with the version numbers of the modules.
        if (versions := getattr(state_dict, "_metadata", None)) is not None:
            vars(stripped)["_metadata"] = copy.copy(versions)
        consume_prefix_in_state_dict_if_present(stripped, "module.")
        return cls._from_object(stripped, preprocessor)

    @classmethod
    def from_model(cls, model: torch.nn.Module, *, preprocessor: Any = None) -> Self:
        """Create a checkpoint of a whole pickled model, as `model.pt` in a new temporary directory.

        Deprecated, with a warning: loading it runs the code in the pickle. Prefer
        `from_state_dict`. `preprocessor` is pickled into the metadata; None for none.
        """
        warn_deprecated("TorchCheckpoint.from_model pickles the model: use from_state_dict.")
        return cls._from_object(model, preprocessor)

    def get_model(self, model: torch.nn.Module | None = None) -> torch.nn.Module:
        """Return the stored model on the CPU, or `model` with the stored weights loaded.

        Pass `model` for a checkpoint of a state dict: it is changed in place and keeps its device.
        For one of a whole model it is ignored, with a warning. The file is unpickled, which can run
        arbitrary code: use it only with trusted checkpoints. Raises `NoModelError` (a RuntimeError)
        if there is no model file and `ConfigError` (a ValueError) if the file holds a state dict
        and `model` is None, or something else.
        """
        import torch

        filename = TorchCheckpoint.MODEL_FILENAME  # not of self: predictors pass other checkpoints
        with self.as_directory() as directory:
            path = Path(directory, filename)
            if not path.exists():
                raise NoModelError(f"{self} does not contain {filename}.", do=_REMEDY)
            # weights_only=False: the file may hold a whole model, as the docstring warns.
            loaded = torch.load(path, map_location="cpu", weights_only=False)
        if isinstance(loaded, torch.nn.Module):
            if model is not None:
                warnings.warn(
                    "The checkpoint contains a whole model: the argument `model` is ignored.",
                    stacklevel=2,
                )
            return loaded
        if not isinstance(loaded, dict):
            raise ConfigError(
                f"The file {filename} of {self} contains a {type(loaded).__name__}, "
                "which is neither a state dict nor a model.",
                do=_REMEDY,
            )
        if model is None:
            raise ConfigError(
                f"{self} contains a state dict, and get_model() got no model to load it into.",
                do="Call get_model(model) with a model of the same architecture.",
            )
        model.load_state_dict(loaded)
        return model

    @classmethod
    def _from_object(cls, model_or_state_dict: Any, preprocessor: Any) -> Self:
        import torch

        # Not removed here: the checkpoint refers to the directory until it is reported.
        directory = tempfile.mkdtemp()
        torch.save(model_or_state_dict, Path(directory, cls.MODEL_FILENAME))
        checkpoint = cls.from_directory(directory)
        if preprocessor:
            checkpoint.set_preprocessor(preprocessor)
        return checkpoint
