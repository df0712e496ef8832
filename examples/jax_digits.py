"""Four workers on two nodes train one JAX model, which resumes exactly after an interruption.

Each worker holds a part of every batch; JAX adds up the gradients of all. For a cloud, name its
provisioner and set `storage_path` to a bucket.
"""

import tempfile
from typing import Any

import numpy

import spotfit
from spotfit.jax import Checkpointer, JaxTrainer

STEPS, BATCH_SIZE, STEPS_PER_REPORT = 200, 128, 50


def train() -> float:
    """Run on every worker; `jax.devices()` are those of all workers."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    features = (features / 16.0).astype("float32")
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))

    def loss_of(weights: Any, x: Any, y: Any) -> Any:
        scores = jax.nn.log_softmax(x @ weights["w"] + weights["b"])
        return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))

    def sgd(weights: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradients), loss

    update = jax.jit(sgd)
    initial = {"w": numpy.zeros((64, 10), "float32"), "b": numpy.zeros(10, "float32")}
    checkpointer = Checkpointer(jax.device_put(initial, whole), total_steps=STEPS)
    checkpointer.restore()
    weights = checkpointer.state
    rows_per_worker = BATCH_SIZE // jax.process_count()
    for step in range(checkpointer.steps, STEPS):
        # The batch depends on the step only: a restarted worker continues with the same rows.
        batch = numpy.random.default_rng(step).integers(len(features), size=BATCH_SIZE)
        own = batch[jax.process_index() * rows_per_worker :][:rows_per_worker]
        x, y = (
            jax.make_array_from_process_local_data(split, one[own]) for one in (features, labels)
        )
        weights, loss = update(weights, x, y)
        checkpointer.step(weights)
        if checkpointer.steps % STEPS_PER_REPORT == 0:
            spotfit.report({"loss": float(loss)})
    predicted = numpy.argmax(features @ weights["w"] + weights["b"], axis=1)
    return float((predicted == labels).mean())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as storage:
        trainer = JaxTrainer(
            train,
            scaling_config=spotfit.ScalingConfig(num_workers=4),
            run_config=spotfit.RunConfig(name="jax", storage_path=storage),
            provisioner="local?nodes=2",
        )
        result = trainer.fit()
        print(f"{STEPS} steps, accuracy above 90 %: {result.return_value > 0.9}")
        print("saved:", result.checkpoint is not None)
