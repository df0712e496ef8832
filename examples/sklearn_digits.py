"""Four workers on two machines fit one random forest of scikit-learn; one of the machines is lost.

Needs `pip install 'spotfit[sklearn]'`. Each worker fits a quarter of the trees, some per
checkpoint, and continues after the loss with those that the latest checkpoint has.
`SklearnTrainer`, for one machine, is shorter (docs/guides/sklearn.md).
"""

import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier

import spotfit
from spotfit_localsim.live.preemption import at_step, scheduled_reclaims
from spotfit_provisioners.local.options import LocalOptions

TREES_PER_WORKER, TREES_PER_CHECKPOINT, ROWS_FOR_TEST = 60, 2, 400


def train() -> int:
    """Fit this worker's trees; return how many the last start has found in a checkpoint."""
    rank = spotfit.get_context().get_world_rank()
    images, digits = load_digits(return_X_y=True)
    # Trees that are added by `warm_start` are those of a forest that was fitted at once.
    forest = RandomForestClassifier(0, warm_start=True, random_state=rank)
    if checkpoint := spotfit.get_checkpoint():
        forest = read_forest(checkpoint, rank)
    found = int(forest.n_estimators)
    for trees in range(found, TREES_PER_WORKER, TREES_PER_CHECKPOINT):
        forest.set_params(n_estimators=trees + TREES_PER_CHECKPOINT)
        forest.fit(images[ROWS_FOR_TEST:], digits[ROWS_FOR_TEST:])
        time.sleep(0.1)  # noqa: TID251  # a step of real work
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, f"forest-{rank}.pkl").write_bytes(pickle.dumps(forest))
            # The files of all ranks form one checkpoint.
            saved = spotfit.Checkpoint.from_directory(directory)
            spotfit.report({"step": forest.n_estimators}, checkpoint=saved)
    return found


def read_forest(checkpoint: spotfit.Checkpoint, rank: int) -> Any:
    """Return the trees of a worker. Unpickles them: only for checkpoints of your own runs."""
    with checkpoint.as_directory() as directory:
        return pickle.loads(Path(directory, f"forest-{rank}.pkl").read_bytes())  # noqa: S301


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        machines = LocalOptions(nodes=2, root=f"{folder}/machines")
        trainer = spotfit.DataParallelTrainer(
            train,
            scaling_config=spotfit.ScalingConfig(num_workers=4),
            run_config=spotfit.RunConfig(name="forest", storage_path=f"{folder}/runs"),
            provisioner=machines,
        )
        reclaims = [at_step(8, node=1)]
        with scheduled_reclaims(f"{folder}/runs/forest", reclaims, options=machines) as schedule:
            result = trainer.fit()
        print(f"lost machines: {len(schedule.completed)}, resumed: {result.return_value > 0}")
        assert result.checkpoint is not None
        forests = [read_forest(result.checkpoint, rank) for rank in range(4)]
        images, digits = load_digits(return_X_y=True)
        votes = sum(forest.predict_proba(images[:ROWS_FOR_TEST]) for forest in forests)
        correct = (votes.argmax(axis=1) == digits[:ROWS_FOR_TEST]).mean()
        trees = sum(len(forest.estimators_) for forest in forests)
        print(f"{trees} trees, accuracy above 90 %: {correct > 0.9}")
