"""`python -m spotfit.fork_server <socket fd> <parent pid> <kind>`: a child in a new interpreter."""

from __future__ import annotations

import sys

from spotfit.fork_server import child_setup
from spotfit.host import log


def main(argv: list[str]) -> None:
    """Prepare this process as the fork server prepares its children, then run the child.

    `argv` has the descriptor of the socket to the agent, the process id of the agent, and the kind
    of the child, such as `"worker"`. `Spawner` starts this program.
    """
    log.use_default_handler()
    socket_fd, parent_pid, kind = int(argv[0]), int(argv[1]), argv[2]
    child_setup.isolate_process(parent_pid)
    child_setup.enable_line_buffering()
    child_setup.run_child(kind, socket_fd)


if __name__ == "__main__":
    main(sys.argv[1:])
