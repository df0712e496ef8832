"""`Feeders`: how many processes and machines transform a trainer's datasets for its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.core.input_checks import ErrorCollector, suggest_keywords
from spotfit.model.spec import FeederSpec


@suggest_keywords
@dataclass(frozen=True, kw_only=True)
class Feeders:
    """Transforms the datasets of a trainer outside of the training process.

    The functions of `map`, `map_batches` and other transforms with user code run in processes
    beside the workers, and on further machines. The rows, their order and their random
    augmentations are the same as without feeders, whatever happens to the machines. Raises
    `ConfigErrors` for invalid values.

    Args:
        nodes: Number of machines, or `(min, max)`: one more is rented while the workers wait for
            rows for more than 5 % of a minute, and one less if they wait for less than 1 %.
        cpus: Processors of each machine; it runs as many processes.
        processes: Processes beside each worker; None: one less than its share of the processors,
            at most 8.
        provisioner: The backend of these machines, as in the trainer; None: that of the workers.
            It must be of the same kind and network, because workers connect to feeders.
    """

    nodes: int | tuple[int, int] = 0
    cpus: float = 8
    processes: int | None = None
    provisioner: Any = None

    def __post_init__(self) -> None:
        errors = ErrorCollector()
        errors.check(self._check_nodes)
        if not _is_number(self.cpus) or self.cpus <= 0:
            errors.add(
                ConfigError(
                    f"Feeders(cpus={self.cpus!r}) must be a positive number.",
                    do="Pass the number of processors of each machine, such as cpus=16.",
                )
            )
        if self.processes is not None and not _is_count(self.processes):
            errors.add(
                ConfigError(
                    f"Feeders(processes={self.processes!r}) must be a number from 0 on, or None.",
                    do="Omit it for a number that depends on the machine.",
                )
            )
        errors.check(self._check_provisioner)
        errors.raise_all()

    @property
    def spec(self) -> FeederSpec:
        """The feeders as the run's spec describes them."""
        least, most = self.nodes if isinstance(self.nodes, tuple) else (self.nodes, self.nodes)
        return FeederSpec(
            min_nodes=least,
            max_nodes=most,
            resources={"CPU": float(self.cpus)},
            processes_per_worker=self.processes,
        )

    def _check_nodes(self) -> None:
        nodes = self.nodes if isinstance(self.nodes, tuple) else (self.nodes, self.nodes)
        if len(nodes) != 2 or not all(map(_is_count, nodes)) or nodes[0] > nodes[1]:
            raise ConfigError(
                f"Feeders(nodes={self.nodes!r}) must be a number of machines from 0 on, or (min, "
                "max).",
                do="Write nodes=2, or nodes=(0, 4) to rent machines while the workers wait.",
            )

    def _check_provisioner(self) -> None:
        if isinstance(self.provisioner, list | tuple):
            raise ConfigError(
                "Feeders(provisioner=[…]) names several backends; feeders have one.",
                do="Name the backend whose machines the workers can connect to.",
            )
        if self.provisioner is not None and self.nodes in (0, (0, 0)):
            raise ConfigError(
                "Feeders(provisioner=…) has no effect without machines.",
                do="Set the number of machines, such as nodes=2, or omit provisioner.",
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
