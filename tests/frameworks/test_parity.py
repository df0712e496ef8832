"""The names of Ray Train for training frameworks: tests/parity, where these are installed."""

from tests.parity.test_ray_train import (
    test_name_of_ray_train_exists as test_name_of_ray_train_exists,
)
