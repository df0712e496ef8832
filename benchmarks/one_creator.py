"""moto's server with serialized creates.

moto checks for an object and then writes it, not atomically. Two concurrent creates could both
succeed, which `fit()` detects and refuses.
"""

import sys
import threading
from typing import Any

from moto import server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication


class OneCreator(DomainDispatcherApplication):
    """All of moto's services."""

    creating = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ.get("HTTP_IF_NONE_MATCH") != "*":
            return super().__call__(environ, start_response)
        with self.creating:
            return super().__call__(environ, start_response)


def main(arguments: list[str]) -> None:
    """As `python -m moto.server` does."""
    vars(server)["DomainDispatcherApplication"] = OneCreator
    server.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
