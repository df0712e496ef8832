"""moto's server with serialized creates.

moto checks for an object and then writes it, not atomically. Two concurrent creates could both
succeed, which `fit()` detects and refuses.
"""

import sys
import threading
from typing import Any

from moto import server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication


class SerializedMoto(DomainDispatcherApplication):
    """moto's dispatcher, with a lock around conditional creates."""

    create_lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ.get("HTTP_IF_NONE_MATCH") != "*":
            return super().__call__(environ, start_response)
        with self.create_lock:
            return super().__call__(environ, start_response)


def main(arguments: list[str]) -> None:
    """Run moto with the arguments of `python -m moto.server`."""
    vars(server)["DomainDispatcherApplication"] = SerializedMoto
    server.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
