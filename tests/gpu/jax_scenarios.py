"""Training functions of the GPU tests with JAX. They do not import torch.

Its CUDA libraries would be loaded instead of those of JAX. jax is imported by the functions: the
machine of the tests may not have it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import spotfit
from spotfit.jax import Checkpointer
from tests.gpu.records import Config, die_once, parent_process, record, wait_for_uploads

STEPS = 24
SAVE_EVERY = 3
BATCH, FEATURES, HIDDEN = 64, 64, 256
DROPOUT = 0.2


def train(config: Config) -> dict[str, Any]:
    """Train with dropout, die once at each step of `kill_at`; return a digest of the state.

    Each start of a worker is recorded in `starts.jsonl`, each step in `steps.jsonl`.
    """
    import jax

    rank = spotfit.get_context().get_world_rank()
    before = parent_process()
    update, state = make_training(config["seed"])
    ckpt = Checkpointer(state, every=SAVE_EVERY)
    began = time.time()
    restored = ckpt.restore()
    state = ckpt.state
    source = restored.source if restored else ""
    restore_s = time.time() - began
    record(config, "starts", step=ckpt.steps, source=source, restore_s=restore_s, **before)
    for step in range(ckpt.steps, STEPS):
        # The arguments of the last state are donated: its memory is used again.
        state, loss = update(state, step)
        ckpt.step(state, {"loss": float(loss)})
        record(config, "steps", step=ckpt.steps, at=time.time())
        die_once(config, rank, ckpt.steps)
    return {
        "digest": digest(state),
        "devices": sorted({one.platform for one in jax.tree.leaves(state)[0].devices()}),
        "steps": int(state["step"]),
    }


def make_training(seed: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a compiled update of a network with dropout, and the initial state."""
    import jax
    import jax.numpy as jnp

    def loss_of(weights: Any, key: Any) -> Any:
        data_key, dropout_key = jax.random.split(key)
        x = jax.random.uniform(data_key, (BATCH, FEATURES))
        hidden = jax.nn.gelu(x @ weights["in"])
        mask = jax.random.bernoulli(dropout_key, 1 - DROPOUT, hidden.shape)
        y = jnp.where(mask, hidden / (1 - DROPOUT), 0.0) @ weights["out"]
        return jnp.square(y[:, 0] - x.mean(1)).mean()

    def update(state: Any, step: Any) -> Any:
        key = jax.random.fold_in(state["key"], step)
        loss, gradients = jax.value_and_grad(loss_of)(state["weights"], key)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        weights = jax.tree.map(lambda w, m: w - 0.01 * m, state["weights"], momentum)
        new = {"weights": weights, "momentum": momentum, "step": state["step"] + 1}
        return state | new, loss

    first, second = jax.random.split(jax.random.key(seed))
    weights = {
        "in": jax.random.normal(first, (FEATURES, HIDDEN)) / FEATURES**0.5,
        "out": jax.random.normal(second, (HIDDEN, 1)) / HIDDEN**0.5,
    }
    momentum = jax.tree.map(jnp.zeros_like, weights)
    # A number, as with flax: the update returns it as an array.
    state = {"weights": weights, "momentum": momentum, "key": jax.random.key(seed), "step": 0}
    return jax.jit(update, donate_argnums=0), state


def save_often(config: Config) -> dict[str, Any]:
    """Measure how long saves block, and a copy of the same arrays to main memory by JAX."""
    import jax
    import jax.numpy as jnp

    width = config["width"]
    state = [jnp.ones((width, width), "float32") for _ in range(3 * config["layers"])]
    # New arrays each time: JAX keeps the copy of an array in main memory.
    update = jax.jit(lambda arrays: [one * 1.001 for one in arrays], donate_argnums=0)
    ckpt = Checkpointer(state, every="10m", save_at_end=False)
    ckpt.restore()
    save_s: list[float] = []
    copy_s: list[float] = []
    for _ in range(config["rounds"] + 1):
        state = jax.block_until_ready(update(state))
        began = time.perf_counter()
        jax.device_get(state)
        copy_s.append(time.perf_counter() - began)
        state = jax.block_until_ready(update(state))
        ckpt.step(state)
        began = time.perf_counter()
        ckpt.save(state)
        save_s.append(time.perf_counter() - began)
        wait_for_uploads(ckpt)
    return {
        "save_s": median(save_s[1:]),  # the first allocates memory
        "copy_s": median(copy_s[1:]),
        "bytes": sum(one.nbytes for one in state),
    }


def digest(state: Any) -> str:
    import jax
    import numpy

    arrays = jax.tree.leaves(state | {"key": jax.random.key_data(state["key"])})
    return hashlib.sha256(b"".join(numpy.asarray(one).tobytes() for one in arrays)).hexdigest()
