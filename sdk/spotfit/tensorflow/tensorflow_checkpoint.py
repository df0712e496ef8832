"""TensorflowCheckpoint: a checkpoint with a Keras model, as in earlier Ray Train APIs."""

from __future__ import annotations

import shutil
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any, Self

from spotfit.core.errors import NotFoundError
from spotfit.frameworks.framework_checkpoint import FrameworkCheckpoint

MODEL_FILENAME = "model.keras"
MODEL_FILENAME_KEY = "_model_filename"
"""Key in a checkpoint's metadata: the name of the model's file; "." for a SavedModel."""


class TensorflowCheckpoint(FrameworkCheckpoint):
    """A checkpoint that stores a Keras model. Deprecated: use `spotfit.Checkpoint`.

    The directory of each stays unless a report deletes it after the upload.
    """

    MODEL_FILENAME_KEY = MODEL_FILENAME_KEY

    @classmethod
    def from_model(cls, model: Any, *, preprocessor: Any = None) -> Self:
        """Create a checkpoint of a Keras model in a new temporary directory.

        `preprocessor` is pickled into the metadata; None for none.
        """
        directory = tempfile.mkdtemp()
        model.save(str(Path(directory, MODEL_FILENAME)))
        return cls._from_file(directory, MODEL_FILENAME, preprocessor)

    @classmethod
    def from_h5(cls, file_path: str | PathLike[str], *, preprocessor: Any = None) -> Self:
        """Create a checkpoint with a copy of a model's HDF5 file in a new temporary directory.

        Raises `NotFoundError` if there is no such file.
        """
        path = Path(file_path)
        if not path.is_file():
            raise NotFoundError(
                f"There is no file {path}.", do="Pass the file that model.save() has written."
            )
        directory = tempfile.mkdtemp()
        shutil.copy(path, directory)
        return cls._from_file(directory, path.name, preprocessor)

    @classmethod
    def from_saved_model(cls, dir_path: str | PathLike[str], *, preprocessor: Any = None) -> Self:
        """Create a checkpoint with a copy of a SavedModel's directory, a new temporary one.

        Raises `NotFoundError` if there is no such directory.
        """
        path = Path(dir_path)
        if not path.is_dir():
            raise NotFoundError(
                f"There is no directory {path}.", do="Pass the directory of a SavedModel."
            )
        directory = tempfile.mkdtemp()
        shutil.copytree(path, directory, dirs_exist_ok=True)
        return cls._from_file(directory, ".", preprocessor)

    def get_model(self) -> Any:
        """Return the stored model; call it in the scope of a strategy to distribute it.

        Raises `NotFoundError` if the metadata names no model, and ImportError without tensorflow.
        """
        import tensorflow as tf

        name = self.get_metadata().get(MODEL_FILENAME_KEY)
        if name is None:
            raise NotFoundError(
                f"The metadata of {self} names no model file.",
                do="Create the checkpoint with TensorflowCheckpoint.from_model(model).",
            )
        with self.as_directory() as directory:
            return tf.keras.models.load_model(str(Path(directory, name)))

    @classmethod
    def _from_file(cls, directory: str, filename: str, preprocessor: Any) -> Self:
        checkpoint = cls.from_directory(directory)
        checkpoint.update_metadata({MODEL_FILENAME_KEY: filename})
        if preprocessor:
            checkpoint.set_preprocessor(preprocessor)
        return checkpoint
