"""prepare_dataset_shard, without TensorFlow."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.tensorflow import prepare_dataset_shard
from tests.unit.tensorflow import fake_tensorflow


class Dataset:
    """Records options and prefetching of a tf.data.Dataset."""

    def with_options(self, options: Any) -> Dataset:
        self.policy = options.experimental_distribute.auto_shard_policy
        return self

    def prefetch(self, count: int) -> tuple[str, int]:
        return self.policy, count


def test_the_dataset_is_not_sharded_again_and_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorflow.install(monkeypatch)
    assert prepare_dataset_shard(Dataset()) == ("off", -1)
