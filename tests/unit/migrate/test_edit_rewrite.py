"""Migration of complete scripts."""

from __future__ import annotations

import pytest

from spotfit.core.errors import ConfigError
from spotfit.migrate.edit import rewrite_script
from tests.unit.migrate.before_and_after import dedent_script, manual_work, migrated_text

SCRIPT = dedent_script('''
    """Train a net."""
    import argparse
    import os
    import tempfile

    import torch
    from torch.utils.data import DataLoader

    import ray
    from ray import train
    from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer, prepare_data_loader


    class Loud(ray.train.UserCallback):
        def after_report(self, run_context, metrics, checkpoint):
            print(metrics[0])


    def train_func(config):
        model = train.torch.prepare_model(torch.nn.Linear(1, 1))
        loader = prepare_data_loader(DataLoader(list(range(8))))
        if train.get_checkpoint():
            with train.get_checkpoint().as_directory() as folder:
                model.load_state_dict(torch.load(os.path.join(folder, "model.pt")))
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
            train.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(folder))
        ray.train.collective.barrier()


    if __name__ == "__main__":
        parser = argparse.ArgumentParser()
        parser.add_argument("--address")
        args = parser.parse_args()
        if not ray.is_initialized():
            ray.init(address=args.address)
        trainer = TorchTrainer(
            train_func,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                callbacks=[Loud()],
                failure_config=FailureConfig(max_failures=3),
                checkpoint_config=CheckpointConfig(num_to_keep=1),
                worker_runtime_env={"env_vars": {"RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "60"}},
            ),
        )
        print(trainer.fit())
''')

CHANGES = {
    "import ray\nfrom ray import train\n": "import spotfit\nimport spotfit as train\n",
    "from ray.train.torch import": "from spotfit.torch import",
    "from ray.train import": "from spotfit import",
    "ray.train.UserCallback": "spotfit.UserCallback",
    "ray.train.collective.barrier": "spotfit.collective.barrier",
    "    if not ray.is_initialized():\n        ray.init(address=args.address)\n": "",
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "SPOTFIT_COLLECTIVE_TIMEOUT_S",
}


def test_a_complete_script_is_migrated() -> None:
    expected = SCRIPT
    for before, after in CHANGES.items():
        assert before in expected
        expected = expected.replace(before, after)
    assert migrated_text(SCRIPT) == expected
    assert manual_work(SCRIPT) == []


def test_an_invalid_script_is_reported_by_name() -> None:
    with pytest.raises(ConfigError, match=r"train\.py is not valid Python"):
        rewrite_script(b"def (:\n", name="train.py")
    with pytest.raises(ConfigError, match="is not valid Python"):
        rewrite_script(b"\xff\xfe\x00")
