"""CheckpointerArguments: the arguments of a Checkpointer, validated all at once.

Wrong arguments are reported together and before any other rank or the model is involved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from torch.nn import Module
from torch.nn.parameter import is_lazy

from spotfit.core.errors import ConfigError
from spotfit.data.iteration.shard_data_position import is_dataset_shard
from spotfit.torch.checkpoint.accelerate_types import unwrap_optimizer
from spotfit.torch.checkpoint.optimizer_state import has_flat_parameters, parameter_names

_STATEFUL_METHODS = ("state_dict", "load_state_dict")
_OPTIMIZER_ATTRIBUTES = ("param_groups", "state", *_STATEFUL_METHODS)
RESERVED_NAMES = ("model", "optimizer", "scheduler", "scaler")
"""Names of the state's built-in components; `extra` and `per_rank` must not use them."""


class CheckpointerArguments(NamedTuple):
    """The user's arguments, not validated yet."""

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    loader: Any = None
    extra: Any = None
    per_rank: Any = None

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """The optimizers as a tuple, whether one, several or none were passed; () for none.

        Those that Accelerate has prepared are replaced by torch's optimizers in them.
        """
        is_sequence = isinstance(self.optimizer, list | tuple)
        optimizers = self.optimizer if is_sequence else [self.optimizer]
        return tuple(unwrap_optimizer(one) for one in optimizers if one is not None)

    def validate(self) -> None:
        """Raise one `ConfigError` that lists all problems found; return if there are none.

        Local to this rank: no communication, and no object is changed.
        """
        if type(self.model).__module__.partition(".")[0] == "deepspeed":
            raise ConfigError(
                "model is an engine of DeepSpeed, whose optimizer has copies of the weights.",
                do="Use spotfit.deepspeed.Checkpointer(engine), also for what Accelerate prepares.",
            )
        # The parameters of model and optimizers can be compared only if their types are right.
        problems = [*self._problems()] or [*self._parameter_problems()]
        if problems:
            raise ConfigError(
                "\n".join(problems),
                do="Pass a torch.nn.Module as model and a torch optimizer or a list of them as "
                "optimizer; all other objects need state_dict and load_state_dict.",
            )

    def _problems(self) -> Iterator[str]:
        if not isinstance(self.model, Module):
            yield f"model is {_type_with_article(self.model)}, not a torch.nn.Module."
        yield from _lazy_parameter_problems("model", self.model)
        for optimizer in self.optimizers:
            yield from _missing_attributes("optimizer", optimizer, _OPTIMIZER_ATTRIBUTES)
        for name in ("scheduler", "scaler"):
            stateful = getattr(self, name)
            if stateful is not None:
                yield from _missing_attributes(name, stateful, _STATEFUL_METHODS)
        # Any iterable object: a position that cannot be saved is logged later.
        if self.loader is not None and (
            not (hasattr(self.loader, "__iter__") or is_dataset_shard(self.loader))
            or isinstance(self.loader, list | tuple | dict | str)
        ):
            yield f"loader is {_type_with_article(self.loader)}, not a DataLoader."
        for name in ("extra", "per_rank"):
            yield from _stateful_problems(name, getattr(self, name))

    def _parameter_problems(self) -> Iterator[str]:
        """Each parameter must be in the model and in one optimizer: its name is its saved key."""
        if has_flat_parameters(self.model):
            return  # FSDP1 replaces the parameters by flat ones, which only torch can map to names
        # By identity, because wrappers and optimizers hold the same Parameter objects.
        names = parameter_names(self.model)
        optimizers_by_name: Counter[str] = Counter()
        for optimizer in self.optimizers:
            weights = {weight for group in optimizer.param_groups for weight in group["params"]}
            unknown = [weight for weight in weights if weight not in names]
            if unknown:
                yield (
                    f"{type(optimizer).__name__} holds {len(unknown)} parameters that are not in "
                    f"model.parameters(), for example one of shape {tuple(unknown[0].shape)}. "
                    "Combine several models in a torch.nn.ModuleDict, and create optimizers after "
                    "prepare_model."
                )
            optimizers_by_name.update(names[weight] for weight in weights if weight in names)
        repeated = sorted(name for name, count in optimizers_by_name.items() if count > 1)
        if repeated:
            yield f"More than one optimizer holds the parameters {', '.join(repeated[:3])}."


def _stateful_problems(argument: str, stateful_objects: Any) -> Iterator[str]:
    if stateful_objects is None:
        return
    if not isinstance(stateful_objects, Mapping):
        kind = _type_with_article(stateful_objects)
        yield f"{argument} is {kind}, not a dictionary of objects by name."
        return
    if reserved := sorted(set(stateful_objects) & set(RESERVED_NAMES)):
        yield f"{argument} uses the reserved names {', '.join(reserved)}: rename these objects."
    for name, stateful in stateful_objects.items():
        if not isinstance(name, str):
            yield f"{argument} has the name {name!r}, which is not a str."
        yield from _missing_attributes(f"{argument}[{name!r}]", stateful, _STATEFUL_METHODS)
        yield from _lazy_parameter_problems(f"{argument}[{name!r}]", stateful)


def _lazy_parameter_problems(argument: str, module: Any) -> Iterator[str]:
    if not isinstance(module, Module):
        return
    # Lazy modules have no parameters to save or restore before their first batch.
    tensors = chain(module.named_parameters(), module.named_buffers())
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        yield (
            f"{argument} has {len(lazy)} lazy parameters without a shape, for example {lazy[0]}: "
            "run one batch through it before creating the Checkpointer."
        )


def _missing_attributes(argument: str, value: Any, names: Iterable[str]) -> Iterator[str]:
    missing = [name for name in names if not hasattr(value, name)]
    if missing:
        yield f"{argument} is {_type_with_article(value)}, which has no {' and no '.join(missing)}."


def _type_with_article(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
