"""`python -m spotfit.agent`: what a machine runs, told by its environment what for."""

from __future__ import annotations

import sys

from spotfit.agent.driver import serve, zygotes_of_this_process
from spotfit.core.errors import ConfigError
from spotfit.host import env, log, process
from spotfit.provision.launch import Assignment, Exit


def main() -> int:
    """Serve the run this machine was started for; the exit code is `driver`'s."""
    process.call_myself("spotfit-agent")
    try:
        env.check()
        assignment = Assignment.read(env.everything())
    except ConfigError as mistake:
        log.error("agent.refused", why=str(mistake))
        return Exit.REFUSED
    try:
        return serve(assignment)
    finally:
        zygotes_of_this_process().close()


if __name__ == "__main__":
    sys.exit(main())
