"""Fixtures of live tests, for tests that train with other frameworks."""

from tests.live.conftest import cloud as cloud
from tests.live.conftest import cold_cloud as cold_cloud
from tests.live.conftest import shared_root as shared_root
