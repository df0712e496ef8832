"""`python -m spotfit.agent`: what a machine runs, told by its environment what for.

`--check` looks at the machine instead, and prints what was found as a line of JSON: whether an
image or a bare machine will do is known before a run is started on it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from spotfit.agent import selfcheck
from spotfit.agent.driver import serve, zygotes_of_this_process
from spotfit.core.errors import ConfigError
from spotfit.host import env, log, process
from spotfit.provision.launch import Assignment, Exit

CHECK = "--check"


def main(words: Sequence[str] = ()) -> int:
    """Serve the run this machine was started for; the exit code is `driver`'s.

    With `--check`: `DONE` where an agent could serve, `REFUSED` where the report has complaints.
    """
    if words:
        return _check(words)
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


def _check(words: Sequence[str]) -> int:
    if list(words) != [CHECK]:
        log.error("agent.refused", why=f"spotfit.agent knows no {' '.join(words)!r}; only {CHECK}")
        return Exit.REFUSED
    found = selfcheck.report()
    sys.stdout.write(f"{selfcheck.told(found)}\n")
    return Exit.REFUSED if found.complaints else Exit.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
