"""Handles of collectives: results and failures."""

from __future__ import annotations

import itertools
import pickle
import traceback

import pytest

from spotfit.horovod.torch.handles import (
    CollectiveHandle,
    HorovodInternalError,
    poll,
    synchronize,
)
from spotfit.model.events import RankFailure
from spotfit.policy.secondary_errors import is_secondary

LOST_PEER = "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:7000"


class Work:
    """Work of torch.distributed that has ended, or fails."""

    def __init__(self, *, error: str = "") -> None:
        self._error = error

    def is_completed(self) -> bool:
        return not self._error

    def wait(self) -> None:
        if self._error:
            raise RuntimeError(self._error)


def test_the_result_is_computed_once() -> None:
    numbers = itertools.count()
    handle = CollectiveHandle([Work()], lambda: next(numbers))
    assert poll(handle)
    assert synchronize(handle) == synchronize(handle) == 0


def test_a_failure_is_an_error_of_horovod_that_names_the_lost_peer() -> None:
    handle = CollectiveHandle([Work(error=LOST_PEER)], lambda: None)
    assert not poll(handle)
    with pytest.raises(HorovodInternalError, match="Connection closed by peer") as raised:
        synchronize(handle)
    message = "".join(traceback.format_exception(raised.value))
    assert is_secondary(RankFailure(rank=0, kind="raised", message=message))


def test_the_error_can_be_pickled() -> None:
    error = HorovodInternalError("A collective failed.", do="Look.")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.message, copy.do) == (error.message, error.do)
