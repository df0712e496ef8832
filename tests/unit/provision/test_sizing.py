"""How many machines a request is."""

import pytest

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.model.group import GroupRequest
from spotfit.provision.sizing import nodes_for


@pytest.mark.parametrize(
    ("workers", "slots", "nodes"), [(1, 1, 1), (4, 2, 2), (5, 2, 3), (1, 8, 1)]
)
def test_there_is_room_for_every_worker(workers: int, slots: int, nodes: int) -> None:
    request = GroupRequest(Token("t-1"), workers, workers)
    assert nodes_for(request, slots=slots, max_nodes=10, backend="cloud") == nodes


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (GroupRequest(Token("t-1"), 0, 4), "0 of 4 workers"),
        (GroupRequest(Token("../up"), 1, 1), "The token"),
        (
            GroupRequest(Token("t-1"), 21, 21),
            "need 11 machines with 2 workers each; cloud gives 10",
        ),
    ],
)
def test_what_cannot_be_is_told(request_: GroupRequest, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        nodes_for(request_, slots=2, max_nodes=10, backend="cloud")
