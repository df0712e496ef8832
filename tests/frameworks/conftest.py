"""Fixtures of tests with training frameworks: those of the live tests."""

from tests.live.conftest import cloud as cloud
from tests.live.conftest import cold_cloud as cold_cloud
from tests.live.conftest import fork_servers as fork_servers
from tests.live.conftest import shared_root as shared_root
