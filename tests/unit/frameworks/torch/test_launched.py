"""A group that a launcher has prepared: joined if it is told of, left as it was found."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from spotfit.core.errors import ConfigError
from spotfit.frameworks.torch.backend import Torch
from spotfit.frameworks.torch.config import TorchConfig
from spotfit.frameworks.torch.launched import backend_for, launched_group, ranks_in
from spotfit.model.ranks import Ranks

TOLD = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As torchrun would start the only process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, text in {**TOLD, **alone, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, text)
    yield
    Torch().leave()


def test_the_launcher_says_who_we_are() -> None:
    assert ranks_in(TOLD) == Ranks(5, 8, 1, 4, node_rank=1)


@pytest.mark.parametrize("name", sorted(TOLD))
def test_without_one_of_its_words_there_is_no_launcher(name: str) -> None:
    assert ranks_in({**TOLD, name: ""}) is None
    assert ranks_in({key: text for key, text in TOLD.items() if key != name}) is None


@pytest.mark.parametrize(
    "wrong",
    [{"RANK": "five"}, {"RANK": "8"}, {"LOCAL_RANK": "4"}, {"LOCAL_WORLD_SIZE": "9"}],
)
def test_words_that_make_no_sense_are_told(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ranks_in({**TOLD, **wrong})


def test_nobody_is_met_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with launched_group(TorchConfig()) as group:
        assert group is None
        assert not dist.is_initialized()


def test_the_group_is_joined_used_and_left(launched: None) -> None:
    with launched_group(TorchConfig(backend="gloo")) as group:
        assert group is not None
        assert (group.ranks.world_size, dist.get_world_size()) == (1, 1)
        group.barrier()
        assert group.broadcast({"seed": 7}) == {"seed": 7}
    assert not dist.is_initialized()


def test_a_group_that_was_there_before_stays(launched: None) -> None:
    dist.init_process_group("gloo")
    with launched_group(TorchConfig()) as group:
        assert group is not None
    assert dist.is_initialized()


def test_after_a_failure_nobody_is_waited_for(launched: None) -> None:
    with pytest.raises(KeyError), launched_group(TorchConfig(backend="gloo")):
        raise KeyError("lr")
    assert dist.is_initialized(), "the launcher ends the others, and this one"


@pytest.mark.parametrize(
    ("named", "cards", "backend"),
    [
        (None, False, "gloo"),
        ("nccl", False, "gloo"),
        ("gloo", True, "cpu:gloo,cuda:nccl"),
        ("mpi", True, "mpi"),
    ],
)
def test_the_group_speaks_what_its_devices_speak(
    named: str | None, *, cards: bool, backend: str
) -> None:
    assert backend_for(named, cards=cards) == backend
