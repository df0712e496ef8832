"""Checkpointer in one process with several devices: a restored state is the saved one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="needs jax: make jax")

import numpy as np  # noqa: E402

from spotfit.checkpoint import base_checkpointer  # noqa: E402
from spotfit.checkpoint.snapshot_channel import run_save_at_end  # noqa: E402
from spotfit.core.errors import ConfigError  # noqa: E402
from spotfit.jax import Checkpointer, export_checkpoint  # noqa: E402
from spotfit.torch import export_checkpoint as export_of_torch  # noqa: E402
from spotfit.worker import training_api  # noqa: E402
from spotfit.worker.local_session import LocalSession  # noqa: E402
from tests.unit.jax.checkpoint.trees import assert_equal, make_tree, sharding  # noqa: E402


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSession]:
    """A session in which each simulated process may create a Checkpointer."""
    monkeypatch.setattr(base_checkpointer, "_reject_second_checkpointer", lambda _: None)
    session = LocalSession("run")
    training_api.set_session(session)
    yield session
    training_api.clear_session()


class Stream:
    """A position in a stream, which belongs to one rank."""

    def __init__(self) -> None:
        self.position: Any = np.array([0])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "skip": np.float32(2.0), "on": jax.numpy.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def save(state: Any, *, initial: Any = None, **options: Any) -> Checkpointer:
    checkpointer = Checkpointer(state if initial is None else initial, every=1, **options)
    checkpointer.step(state)
    return checkpointer


def test_all_kinds_of_leaves_are_restored() -> None:
    save(make_tree(3.0))
    again = Checkpointer(make_tree(5.0))
    restored = again.restore()
    assert restored is not None
    assert (restored.step, restored.source, again.steps) == (1, "bucket", 1)
    assert_equal(again.state, make_tree(3.0))


def test_without_a_checkpoint_the_initial_state_stays() -> None:
    state = make_tree(3.0)
    checkpointer = Checkpointer(state)
    assert checkpointer.restore() is None
    assert checkpointer.state is state


def test_descriptions_of_arrays_are_enough_to_restore() -> None:
    save({"w": jax.device_put(np.arange(8.0), sharding("a"))})
    described = jax.ShapeDtypeStruct((8,), "float32", sharding=sharding("b"))
    again = Checkpointer({"w": described})
    again.restore()
    assert again.state["w"].sharding == sharding("b")
    assert again.state["w"].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("saved_axes", "restored_axes"),
    [(("a", "b"), ("b", "a")), ((), ("a", "b")), (("a", None), (None, "b")), (("b", "a"), ())],
)
def test_other_shardings_restore_the_same_values(saved_axes: Any, restored_axes: Any) -> None:
    values = np.arange(2_400_000.0, dtype="float32").reshape(1200, 2000)
    save([jax.device_put(values, sharding(*saved_axes))])
    again = Checkpointer([jax.device_put(0 * values, sharding(*restored_axes))])
    again.restore()
    assert again.state[0].sharding == sharding(*restored_axes)
    assert np.array_equal(again.state[0], values)


def test_another_dtype_is_converted_and_logged(capsys: pytest.CaptureFixture[str]) -> None:
    save({"w": jax.numpy.full(3, 1.5)})
    again = Checkpointer({"w": jax.numpy.zeros(3, "bfloat16")})
    again.restore()
    assert (again.state["w"].tolist(), again.state["w"].dtype) == ([1.5] * 3, "bfloat16")
    assert "w is bfloat16, was float32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"w": np.ones((3, 2)), "n": 1}, r"w is float64\[3,2\], was float64\[2,3\]"),
        ({"w": np.ones((2, 3)), "n": 1, "v": np.ones(1)}, "v was not saved"),
        ({"w": np.ones((2, 3)), "n": 1, "m": 1}, "m was not saved"),
        ({"w": np.ones((2, 3))}, "n would be lost"),
        ({"n": 1}, "w would be lost"),
        ({"w": np.ones((2, 3), int), "n": 1}, r"w is int64\[2,3\], was float64\[2,3\]"),
        ({"w": "text", "n": 1}, r"w is a str, was float64\[2,3\]"),
    ],
)
def test_a_state_that_does_not_match_is_rejected(state: Any, problem: str) -> None:
    save({"w": np.ones((2, 3)), "n": 1})
    with pytest.raises(ConfigError, match=problem) as error:
        Checkpointer(state).restore()
    assert error.value.details["retryable"] is False


def test_ranks_are_compared_in_a_new_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(Checkpointer, "_compare_ranks", lambda _, tree: compared.append(tree))
    state = {"w": np.ones(2)}
    new = Checkpointer(state, every=1)
    new.restore()
    new.step(state)
    assert len(compared) == 1
    again = Checkpointer(state, every=1)
    again.restore()
    again.step(state)
    assert len(compared) == 1


def test_a_number_that_an_update_makes_an_array_continues_without_compiling() -> None:
    traces = []

    def halve(state: Any) -> Any:
        traces.append(state)
        return {"step": state["step"] + 1, "w": state["w"] * 0.5}

    update = jax.jit(halve)
    initial = {"step": 0, "w": jax.numpy.ones(2, "bfloat16")}
    save(update(initial))
    again = Checkpointer(initial, every=1)
    again.restore()
    assert (again.state["step"], type(again.state["step"])) == (1, int)
    again.step(update(again.state))
    assert len(traces) == 1
    last = Checkpointer(initial)
    last.restore()
    assert (last.state["step"], last.state["w"].tolist()) == (2, [0.25, 0.25])


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        (jax.numpy.asarray(2.5), 2.5),
        (jax.numpy.asarray(True), True),
        # Another dtype than that of a number would be lost in one.
        (jax.numpy.asarray(2, "int16"), np.int16(2)),
        (np.float64(0.1), np.float64(0.1)),
    ],
)
def test_a_number_is_restored_from_an_array(saved: Any, restored: Any) -> None:
    save({"n": saved}, initial={"n": 0})
    again = Checkpointer({"n": 0})
    again.restore()
    assert_equal(again.state, {"n": restored})


@pytest.mark.parametrize(
    ("initial", "restored"),
    [
        (np.int64(0), np.int64(3)),
        (jax.numpy.zeros((), "float32"), jax.numpy.asarray(3.0)),
        (jax.device_put(np.float32(0), sharding()), None),
    ],
)
def test_an_array_is_restored_from_a_number(initial: Any, restored: Any) -> None:
    save({"n": 3}, initial={"n": initial})
    again = Checkpointer({"n": initial})
    again.restore()
    expected = jax.device_put(jax.numpy.asarray(3.0), sharding()) if restored is None else restored
    assert_equal(again.state, {"n": expected})


def test_weak_types_are_the_saved_ones() -> None:
    weak = jax.numpy.where(np.array([True, False]), 0.1, -0.0)
    strong = jax.numpy.ones((2, 2))
    state = {
        "weak": weak,
        "strong": strong,
        "sharded": jax.device_put(jax.numpy.full((4, 2), 3.0), sharding("a")),
    }
    initial = {"weak": 0 * strong[0], "strong": jax.numpy.full((2, 2), 0.0), "sharded": 0 * strong}
    initial["sharded"] = jax.device_put(jax.numpy.zeros((4, 2)), sharding("a"))
    save(state, initial=initial)
    again = Checkpointer(initial)
    again.restore()
    assert_equal(again.state, state)


def test_random_numbers_of_numpy_continue() -> None:
    np.random.seed(3)
    save([1])
    expected = np.random.random()
    Checkpointer([0]).restore()
    assert np.random.random() == expected


def test_the_objects_of_a_rank_are_restored() -> None:
    stream = Stream()
    stream.position = np.array([5, 6])
    save([1], per_rank={"stream": stream})
    again = Stream()
    Checkpointer([0], per_rank={"stream": again}).restore()
    assert again.position.tolist() == [5, 6]


def test_objects_of_a_rank_with_other_names_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    save([1], per_rank={"stream": Stream(), "old": Stream()})
    Checkpointer([0], per_rank={"stream": Stream(), "new": Stream()}).restore()
    output = capsys.readouterr().err
    assert "checkpoint.unused_state names=['old']" in output
    assert "checkpoint.state_not_restored names=['new']" in output


def test_the_last_steps_are_saved_at_the_end(session: LocalSession) -> None:
    checkpointer = Checkpointer({"w": jax.numpy.zeros(2)}, every=100)
    checkpointer.step({"w": jax.numpy.ones(2)})
    end = run_save_at_end(session.snapshot_channel)
    assert end is not None
    assert (end.has_snapshot, end.error, len(end.state_digest)) == (True, "", 64)
    again = Checkpointer({"w": jax.numpy.zeros(2)})
    again.restore()
    assert again.state["w"].tolist() == [1.0, 1.0]


def test_a_donated_state_is_not_saved_at_the_end(session: LocalSession) -> None:
    state = {"w": jax.numpy.ones(2)}
    Checkpointer(state, every=100).step(state)
    state["w"].delete()
    end = run_save_at_end(session.snapshot_channel)
    assert end is not None
    assert "state.w was donated, or deleted" in end.error


def test_a_save_of_a_donated_state_is_skipped_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = {"w": jax.numpy.ones(2)}
    checkpointer = Checkpointer(state, every=1)
    checkpointer.step(state, hold=True)
    state["w"].delete()
    with pytest.raises(ConfigError, match=r"state\.w was donated, or deleted"):
        checkpointer.save_if_due()
    assert "checkpoint.skipped" in capsys.readouterr().err


def test_a_save_is_complete_before_the_state_is_donated() -> None:
    state = {"w": jax.numpy.full(1000, 7.0)}
    save(state)
    state["w"].delete()
    again = Checkpointer({"w": jax.numpy.zeros(1000)})
    again.restore()
    assert (np.asarray(again.state["w"]) == 7.0).all()


def test_a_state_with_other_leaves_is_rejected() -> None:
    checkpointer = Checkpointer({"w": np.ones(1)}, every=1)
    with pytest.raises(ConfigError, match="other leaves than the one with which"):
        checkpointer.step({"v": np.ones(1)})


def test_objects_that_cannot_be_saved_are_named_at_the_first_step() -> None:
    state = {"apply": print, "w": np.ones(1)}
    with pytest.raises(ConfigError, match=r"The state of state\.apply contains objects"):
        Checkpointer(state, every=100).step(state)


def test_epochs_need_a_dataset_shard() -> None:
    with pytest.raises(ConfigError, match="loader= is missing"):
        Checkpointer([1], every="epoch")
    with pytest.raises(ConfigError, match="a list is no dataset shard"):
        Checkpointer([1], loader=[1, 2])


def test_objects_without_state_methods_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"per_rank\['x'\] is a int"):
        Checkpointer([1], per_rank={"x": 1})


def test_a_checkpoint_is_exported_as_safetensors(session: LocalSession, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    save({"params": [jax.device_put(np.arange(8.0, dtype="float32"), sharding("a"))], "step": 3})
    assert session.last_checkpoint is not None
    export_checkpoint(session.last_checkpoint, tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    assert {name: array.tolist() for name, array in loaded.items()} == {"params.0": [*range(8)]}
    with pytest.raises(ConfigError, match="it is a pytree of JAX"):
        export_of_torch(session.last_checkpoint, tmp_path / "state.pt")


def test_a_machine_without_torch_saves_and_restores() -> None:
    names = "pytree_checkpointer", "array_arena", "array_restore", "signed_collectives"
    program = "import importlib, sys\n" + "".join(
        f"importlib.import_module('spotfit.jax.checkpoint.{name}')\n" for name in names
    )
    subprocess.run(
        [sys.executable, "-c", f"{program}assert 'torch' not in sys.modules"], check=True
    )
