"""The fixtures of live tests, for training libraries that `make frameworks` installs."""

from tests.live.conftest import cloud, cold_cloud, shared_root

__all__ = ["cloud", "cold_cloud", "shared_root"]
