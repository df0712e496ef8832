"""The processes of a machine for feeders."""

from __future__ import annotations

import cloudpickle
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.feeding.feeder_process import FeederInit
from spotfit.data.feeding.feeder_server import FeederServer
from spotfit.host import env
from tests.unit.data.feeding.augmented_rows import RUN_ID, dataset_of, shipped

INIT = FeederInit(secret="", run_id=RUN_ID)


def pickled_datasets() -> bytes:
    pickled: bytes = cloudpickle.dumps(shipped(dataset_of(3)))
    return pickled


def test_the_address_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.HOST.name, "127.0.0.1")
    server = FeederServer(INIT, pickled_datasets(), processes=2)
    try:
        host, _, port = server.address.rpartition(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        assert len(set(server.pids)) == 2
    finally:
        server.close()


def test_an_address_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.HOST.name, "127.0.0.256")
    monkeypatch.setattr("socket.getaddrinfo", lambda *_args, **_options: [(2,)])
    with pytest.raises(ConfigError, match=r"cannot listen on '127\.0\.0\.256'"):
        FeederServer(INIT, pickled_datasets(), processes=1)
