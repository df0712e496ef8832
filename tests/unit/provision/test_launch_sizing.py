"""The number of machines of a request."""

import pytest

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.provision.launch import count_nodes


@pytest.mark.parametrize(
    ("workers", "slots", "nodes"), [(1, 1, 1), (4, 2, 2), (5, 2, 3), (1, 8, 1)]
)
def test_machines_have_slots_for_all_workers(workers: int, slots: int, nodes: int) -> None:
    request = GroupRequest(token=Token("t-1"), num_workers=workers, total_workers=workers)
    assert count_nodes(request, slots=slots, max_nodes=10, backend="cloud") == nodes


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            GroupRequest(token=Token("t-1"), num_workers=0, total_workers=4),
            "num_workers=0, total_workers=4",
        ),
        (GroupRequest(token=Token("../up"), num_workers=1, total_workers=1), "The token"),
        (
            GroupRequest(token=Token("t-1"), num_workers=21, total_workers=21),
            "need 11 machines with 2 workers each; cloud allows at most 10",
        ),
    ],
)
def test_impossible_request_is_rejected(request_: GroupRequest, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        count_nodes(request_, slots=2, max_nodes=10, backend="cloud")
