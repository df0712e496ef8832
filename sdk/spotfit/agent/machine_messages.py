"""Lines for the log of a run about its machines: their sizes, and several on one instance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from spotfit.core.ids import AgentId
from spotfit.core.units import format_count
from spotfit.model.topology import Member, NodeAssignment

_MAX_LISTED_MACHINES = 4


class MachineMessages:
    """Describes each machine, and each instance that several machines share, once."""

    def __init__(self) -> None:
        self._described: set[AgentId] = set()
        self._warned: set[frozenset[AgentId]] = set()

    def describe_sizes(self, members: Iterable[Member]) -> Iterator[str]:
        """Yield one line per size of machines that were not described before.

        Agents of versions that do not report their size are left out.
        """
        names_by_size: dict[str, list[str]] = defaultdict(list)
        for member in members:
            if member.size is not None and member.agent not in self._described:
                self._described.add(member.agent)
                names_by_size[str(member.size)].append(f"{member.token}/{member.node}")
        for size, names in names_by_size.items():
            yield f"{_format_names(names)}: {size}{' each' if len(names) > 1 else ''}"

    def warn_of_shared_instances(self, assignments: Iterable[NodeAssignment]) -> Iterator[str]:
        """Yield a warning with a remedy per instance that several machines of a round share."""
        by_instance: dict[str, list[NodeAssignment]] = defaultdict(list)
        for assignment in assignments:
            if assignment.instance:
                by_instance[assignment.instance].append(assignment)
        for instance, sharing in by_instance.items():
            agents = frozenset(one.agent for one in sharing)
            if len(sharing) < 2 or agents in self._warned:
                continue
            self._warned.add(agents)
            workers = sum(one.num_workers for one in sharing)
            copies = (
                "copies of snapshots in memory are kept on other instances"
                if len(by_instance) > 1
                else "copies of snapshots in their memory are lost with it"
            )
            yield (
                f"{_format_names([one.machine_name for one in sharing])} share one instance "
                f"({instance}): its preemption ends all of them at once; {copies}. What to do: "
                f"Set workers_per_node={workers} in the backend's options, so that one machine "
                "uses the instance, or request more than half of an instance's CPUs or memory in "
                "resources_per_worker."
            )


def _format_names(names: list[str]) -> str:
    """For example "machines t-1/0, t-1/1"; of many machines only their number."""
    if len(names) > _MAX_LISTED_MACHINES:
        return format_count(len(names), "machine")
    return f"machine{'s' if len(names) > 1 else ''} {', '.join(names)}"
