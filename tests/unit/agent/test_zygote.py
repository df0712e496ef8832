"""The agent's end of a zygote: kept warm, replaced when dead, given up when it cannot live."""

import socket
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from spotfit.agent.zygote import Breed, Zygote, ZygoteKeeper
from spotfit.core.ids import RunId, Token
from spotfit.host import process
from spotfit.model.cradle import Awake, Born, FromZygote, Gone, Ripe
from spotfit.provision.launch import Assignment, Launch


@pytest.fixture
def keeper() -> Iterator[ZygoteKeeper]:
    keeper = ZygoteKeeper()
    yield keeper
    keeper.close()


def hear(zygote: Zygote, kind: type[FromZygote]) -> FromZygote:
    """Its next message of that kind."""
    zygote.control.settimeout(30)
    while (messages := one(zygote)) is not None:
        for message in messages:
            if isinstance(message, kind):
                return message
    raise AssertionError("it said its last word")


def one(zygote: Zygote) -> list[FromZygote] | None:
    zygote.control.recv(1, socket.MSG_PEEK)
    zygote.control.settimeout(0)
    try:
        return zygote.hear()
    finally:
        zygote.control.settimeout(30)


def warm(keeper: ZygoteKeeper, **variables: str) -> Zygote:
    zygote = keeper.warm(Breed.of("none", sys.executable, variables))
    assert zygote is not None
    return zygote


def test_one_breed_is_one_zygote_for_as_long_as_it_lives(keeper: ZygoteKeeper) -> None:
    first = warm(keeper)
    assert warm(keeper) is first
    assert warm(keeper, MINE="yes") is not first
    hear(first, Awake)
    process.kill(first.pid)
    first._process.wait()
    assert warm(keeper) is not first


def test_a_child_is_born_and_its_end_told(keeper: ZygoteKeeper) -> None:
    zygote = warm(keeper)
    here, there = socket.socketpair()
    serial = zygote.bear("worker", [there.fileno(), 1, 2])
    there.close()
    born = hear(zygote, Born)
    assert isinstance(born, Born)
    here.close()  # without its agent a worker ends
    gone = hear(zygote, Gone)
    assert isinstance(gone, Gone)
    assert (gone.serial, gone.pid) == (serial, born.pid)


def test_it_is_ripe_once_it_says_so(keeper: ZygoteKeeper) -> None:
    zygote = warm(keeper)
    assert not zygote.ripe
    hear(zygote, Ripe)
    assert (zygote.awake, zygote.ripe) == (True, True)


def test_an_assignment_says_what_to_begin_with(keeper: ZygoteKeeper) -> None:
    launch = Launch("/run", RunId("r"), "secret", framework="none")
    keeper.begin(Assignment(launch, Token("t"), 0, 1))
    (begun,) = keeper._kept.values()
    assert begun.breed.framework == "none"
    keeper.begin(Assignment(replace(launch, framework=""), Token("t"), 0, 1))
    assert list(keeper._kept.values()) == [begun], "nobody knows yet what will be needed"


def test_only_the_latest_are_kept(keeper: ZygoteKeeper) -> None:
    old, newer, newest = warm(keeper, N="1"), warm(keeper, N="2"), warm(keeper, N="3")
    keeper.spare(newest.breed)
    assert (old.alive, newer.alive, newest.alive) == (False, True, True)


def test_a_breed_that_cannot_live_is_given_up(keeper: ZygoteKeeper) -> None:
    variables = {"PYTHONHOME": "/nowhere"}  # such an interpreter does not even start
    for _ in range(2):
        warm(keeper, **variables)._process.wait()
    assert keeper.warm(Breed.of("none", sys.executable, variables)) is None


def test_where_no_process_can_be_started_there_is_none_for_now(keeper: ZygoteKeeper) -> None:
    assert keeper.warm(Breed("none", "/no/such/python")) is None
    assert keeper._kept == {}


def test_where_forks_are_forbidden_there_is_none(
    keeper: ZygoteKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_FORK", "never")
    assert keeper.warm(Breed("none")) is None


def test_what_only_agents_are_told_is_kept_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTFIT_RUN_SECRET", "s")
    monkeypatch.setenv("SPOTFIT_LOG_LEVEL", "DEBUG")
    environment = Breed.of("none", sys.executable, {"MINE": "yes"}).environment()
    assert "SPOTFIT_RUN_SECRET" not in environment
    assert environment["SPOTFIT_LOG_LEVEL"] == "DEBUG"
    assert environment["MINE"] == "yes"


def test_nothing_of_it_is_left_when_it_is_killed(keeper: ZygoteKeeper) -> None:
    zygote = warm(keeper)
    keeper.close()
    assert not zygote.alive
    assert not process.exists(zygote.pid)
