"""`Predictor`: a model from a checkpoint, called with batches. Base class of the predictors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.frameworks.framework_checkpoint import FrameworkCheckpoint, json_preprocessor
from spotfit.prediction.batches import Batch


class Predictor:
    """Predicts batches with a model of a checkpoint.

    Subclasses define `from_checkpoint` and `predict_batch`. `predict` applies the preprocessor
    first, whose `transform_batch(batch)` returns a batch.
    """

    preload_modules: ClassVar[tuple[str, ...]] = ()
    """What machines import once, before they start workers, as with `RunConfig(preload=...)`."""

    def __init__(self, preprocessor: Any = None) -> None:
        self._preprocessor = preprocessor

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *args: Any, **kwargs: Any) -> Self:
        """Create the predictor in a worker. The base class calls the constructor with a directory.

        That directory has the files of the checkpoint; it is removed after the call.
        """
        with checkpoint.as_directory() as directory:
            return cls(directory, *args, **kwargs)

    @classmethod
    def identity_arguments(cls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what of the arguments of `from_checkpoint` distinguishes one job from another.

        By default all. A subclass replaces values that the checkpoint overwrites.
        """
        return arguments

    def get_preprocessor(self) -> Any:
        """Return the preprocessor of the batches, or None."""
        return self._preprocessor

    def set_preprocessor(self, preprocessor: Any) -> None:
        """Set the preprocessor of the batches; None for none."""
        self._preprocessor = preprocessor

    def predict(self, data: Batch, *args: Any, **kwargs: Any) -> Batch:
        """Return the predictions of a batch; further arguments are those of `predict_batch`."""
        if self._preprocessor is not None:
            data = self._preprocessor.transform_batch(data)
        return self.predict_batch(data, *args, **kwargs)

    def predict_batch(self, data: Batch, *args: Any, **kwargs: Any) -> Batch:
        """Return the predictions of a preprocessed batch. Subclasses define it."""
        raise TypeError(f"{type(self).__name__} does not define predict_batch()")

    def __call__(self, batch: Batch) -> Batch:
        """Return `predict(batch)`, so that `spotfit.predict` can use the class."""
        return self.predict(batch)


def preprocessor_of(checkpoint: Checkpoint) -> Any:
    """Return the preprocessor in the checkpoint's metadata, or None.

    That of the checkpoint of a framework may be a pickle: use trusted checkpoints only.
    """
    if isinstance(checkpoint, FrameworkCheckpoint):
        return checkpoint.get_preprocessor()
    # Of a plain Checkpoint nothing is unpickled.
    return json_preprocessor(checkpoint.get_metadata())


PredictFunction = Callable[[Batch], Any]


@dataclass(frozen=True)
class PredictorSource:
    """The predictor of a job, which each worker creates once; pickled to the workers."""

    predictor: Any
    """A class whose instances are called with batches, or a function."""
    checkpoint: Checkpoint | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise `ConfigError` if the predictor and its arguments do not fit."""
        if not callable(self.predictor):
            raise ConfigError(
                f"The predictor must be a class or a function, not a "
                f"{type(self.predictor).__name__}.",
                do="Pass a class whose instances are called with a batch, or a function.",
            )
        if isinstance(self.predictor, type):
            # Not callable(): the class itself is callable, its instances may be not.
            if not any("__call__" in vars(base) for base in self.predictor.__mro__):
                raise ConfigError(
                    f"The class {self.predictor.__name__} has no method __call__.",
                    do="Define __call__(self, batch), which returns the predictions of a batch.",
                )
        elif self.checkpoint is not None or self.arguments:
            raise ConfigError(
                "checkpoint= and fn_constructor_kwargs= need a class: a function has no "
                "constructor.",
                do="Pass a class that loads the model in __init__, or bind arguments to the "
                "function with functools.partial.",
            )

    def identity_arguments(self) -> Mapping[str, Any]:
        """Return what of the arguments distinguishes one job from another."""
        is_predictor = isinstance(self.predictor, type) and issubclass(self.predictor, Predictor)
        if self.checkpoint is None or not is_predictor:
            return self.arguments
        return self.predictor.identity_arguments(self.arguments)  # type: ignore[no-any-return]

    def preload_modules(self) -> tuple[str, ...]:
        """Return the `preload_modules` of the predictor and of predictors in its arguments."""
        kinds = [self.predictor, *self.arguments.values()]
        found = [one for one in kinds if isinstance(one, type) and issubclass(one, Predictor)]
        return tuple(name for one in found for name in one.preload_modules)

    @contextmanager
    def open(self) -> Iterator[PredictFunction]:
        """Yield the function that predicts batches. Files of the checkpoint exist in the block."""
        create: Any = self.predictor
        if not isinstance(create, type):
            yield create
        elif self.checkpoint is None:
            yield self.predictor(**self.arguments)
        elif issubclass(create, Predictor):
            yield create.from_checkpoint(self.checkpoint, **self.arguments)
        else:
            # Kept until the end: the model may map its files into memory.
            with self.checkpoint.as_directory() as directory:
                yield self.predictor(directory, **self.arguments)
