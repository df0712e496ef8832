"""JAX's configuration and distributed runtime."""

from __future__ import annotations

import multiprocessing
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from spotfit.core.errors import ConfigError, MissingExtraError
from spotfit.frameworks.backend_config import backend_hooks_class
from spotfit.frameworks.jax.jax_config import JaxConfig, JaxFramework
from spotfit.frameworks.registry import open_framework
from spotfit.model.config import ScalingConfig
from tests.unit.frameworks.workers import a_worker_start

GPUS: dict[str, Any] = {
    "devices": ("cuda:0", "cuda:1", "cuda:2", "cuda:3"),
    "options": {"device": "cuda"},
}


class FakeJax(ModuleType):
    """Records what the framework asks of JAX."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, cache: str | None = None) -> None:
        super().__init__("jax")
        self.settings: dict[str, Any] = {}
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.config = SimpleNamespace(
            jax_compilation_cache_dir=cache, update=self.settings.__setitem__
        )
        self.distributed = SimpleNamespace(
            initialize=lambda *args, **options: self.calls.append((args, options)),
            shutdown=lambda: self.calls.append(((), {})),
        )
        self.runtime = SimpleNamespace(make_gloo_tcp_collectives=lambda **options: options)
        for name in ("jax", "jax._src"):
            monkeypatch.setitem(sys.modules, name, self)
        lib: Any = ModuleType("jax._src.lib")
        lib._jax = self.runtime
        monkeypatch.setitem(sys.modules, "jax._src.lib", lib)


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> FakeJax:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return FakeJax(monkeypatch)


def gather_address(label: str, value: bytes) -> tuple[bytes, ...]:
    """The gather of a group of two: the other rank has no address."""
    assert label == "jax_coordinator"
    return (value or b"10.0.0.1:7000", b"")


@pytest.mark.parametrize(
    ("scaling", "device"),
    [
        (ScalingConfig(num_workers=2), "cpu"),
        (ScalingConfig(num_workers=2, use_gpu=True), "cuda"),
        (ScalingConfig(num_workers=2, use_tpu=True, topology="2x2", accelerator_type="V4"), "tpu"),
    ],
)
def test_the_device_follows_from_the_workers(scaling: ScalingConfig, device: str) -> None:
    assert JaxConfig().framework_options(scaling) == ("jax", {"device": device})
    assert isinstance(open_framework("jax"), JaxFramework)
    assert backend_hooks_class(JaxConfig()) is None


@pytest.mark.parametrize("field", ["use_gpu", "use_tpu"])
def test_a_device_that_the_workers_do_not_request_is_rejected(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"ScalingConfig\({field}=True\)"):
        JaxConfig(**{field: True}).framework_options(ScalingConfig(num_workers=2))


def test_workers_that_share_a_gpu_are_rejected() -> None:
    scaling = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 0.5})
    with pytest.raises(ConfigError, match="share a GPU"):
        JaxConfig().framework_options(scaling)


def test_the_environment_has_ranks_and_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    start = a_worker_start(rank=1, world_size=2)
    variables = JaxFramework().environment(start)
    assert (variables["RANK"], variables["JAX_PLATFORMS"]) == ("1", "cpu")
    monkeypatch.setenv("JAX_PLATFORMS", "rocm")
    assert JaxFramework().environment(start)["JAX_PLATFORMS"] == "rocm"


def test_visible_devices_are_those_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    start = a_worker_start(rank=1, world_size=2, resources={"GPU": 2}, **GPUS)
    variables = JaxFramework().environment(start)
    assert variables["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert variables["JAX_PLATFORMS"] == "cuda,cpu"


def test_a_worker_uses_its_own_gpus_of_those_that_it_sees(jax: FakeJax) -> None:
    start = a_worker_start(rank=1, world_size=2, resources={"GPU": 2}, **GPUS)
    JaxFramework().form_group(start, gather_address)
    [(args, options)] = jax.calls
    assert args == ("10.0.0.1:7000", 2, 1)
    assert options["local_device_ids"] == [2, 3]
    assert options["cluster_detection_method"] == "deactivate"


def test_rank_0_chooses_a_port_and_all_timeouts_are_given(jax: FakeJax) -> None:
    JaxFramework().form_group(a_worker_start(world_size=2), gather_address)
    [(args, options)] = jax.calls
    host, _, port = args[0].partition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    assert args[1:] == (2, 0)
    assert options["coordinator_bind_address"] == args[0]
    timeouts = ("initialization_timeout", "heartbeat_timeout_seconds", "shutdown_timeout_seconds")
    assert [options[name] for name in timeouts] == [300, 600, 30]


def test_gloo_listens_at_the_address_of_the_node(jax: FakeJax) -> None:
    start = a_worker_start(rank=1, world_size=2, host="10.0.0.2")
    JaxFramework().form_group(start, gather_address)
    assert jax.runtime.make_gloo_tcp_collectives() == {"hostname": "10.0.0.2"}


def test_a_jax_without_that_function_is_used_as_it_is(jax: FakeJax) -> None:
    del jax.runtime.make_gloo_tcp_collectives
    JaxFramework().form_group(a_worker_start(rank=1, world_size=2), gather_address)
    assert len(jax.calls) == 1


def test_a_single_worker_is_configured_and_forms_no_group(
    jax: FakeJax, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    framework = JaxFramework()
    framework.form_group(a_worker_start(scratch_dir="/scratch"), no_gather)
    framework.leave_group()
    assert jax.calls == []
    assert jax.settings == {
        "jax_platforms": "cpu",
        "jax_compilation_cache_dir": "/scratch/jax_cache",
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }


def test_the_cache_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = FakeJax(monkeypatch, cache="gs://bucket/cache")
    JaxFramework().form_group(a_worker_start(), no_gather)
    assert list(jax.settings) == ["jax_platforms"]


def test_a_shutdown_that_blocks_is_abandoned(jax: FakeJax, monkeypatch: pytest.MonkeyPatch) -> None:
    framework = JaxFramework()
    framework.form_group(a_worker_start(rank=1, world_size=2), gather_address)
    monkeypatch.setenv("JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S", "0.01")
    lock = multiprocessing.Lock()
    lock.acquire()
    jax.distributed.shutdown = lock.acquire
    framework.leave_group()
    lock.release()


def test_a_shutdown_that_fails_is_logged(
    jax: FakeJax, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("the barrier failed\nin detail")

    framework = JaxFramework()
    framework.form_group(a_worker_start(rank=1, world_size=2), gather_address)
    jax.distributed.shutdown = fail
    framework.leave_group()
    framework.leave_group()  # a no-op
    assert "the barrier failed" in caplog.text + capfd.readouterr().err


def test_a_machine_without_jax_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingExtraError, match="jax"):
        JaxFramework().form_group(a_worker_start(), no_gather)


def no_gather(_label: str, _value: bytes) -> tuple[bytes]:
    raise AssertionError("a group of one gathers nothing")
