"""Command line of the agent: `python -m spotfit.agent [--check]`.

Without arguments it serves the run that the environment variables describe. With `--check` it
inspects the machine and prints a `NodeReport` as one line of JSON, so that an image or a bare
machine can be tested before a run uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from spotfit.agent import selfcheck
from spotfit.agent.driver import serve, shared_fork_servers
from spotfit.core.errors import ConfigError
from spotfit.host import env, log, process
from spotfit.provision.launch import AgentAssignment, AgentExitCode

CHECK_FLAG = "--check"


def main(arguments: Sequence[str] = ()) -> int:
    """Serve the run that the environment variables describe; return an `AgentExitCode`.

    Blocks until the run ends. With `["--check"]`: prints the `NodeReport` and returns `DONE` if an
    agent could serve on this machine, `NODE_UNUSABLE` if the report lists problems. Other
    arguments, and missing or invalid variables, also return `NODE_UNUSABLE`, with the reason in the
    log.
    """
    log.use_default_handler()
    if arguments:
        return _check(arguments)
    process.set_process_name("spotfit-agent")
    process.raise_descriptor_limit()
    try:
        env.check_all()
        assignment = AgentAssignment.from_environment(env.copy_environment())
    except ConfigError as error:
        log.error("agent.refused", reason=str(error))
        return AgentExitCode.NODE_UNUSABLE
    try:
        return serve(assignment)
    finally:
        shared_fork_servers().close()


def _check(arguments: Sequence[str]) -> int:
    if list(arguments) != [CHECK_FLAG]:
        log.error(
            "agent.refused",
            reason=f"unknown arguments {' '.join(arguments)!r}; the only option is {CHECK_FLAG}",
        )
        return AgentExitCode.NODE_UNUSABLE
    report = selfcheck.inspect_node()
    sys.stdout.write(f"{selfcheck.format_report(report)}\n")
    return AgentExitCode.NODE_UNUSABLE if report.problems else AgentExitCode.DONE


if __name__ == "__main__":
    sys.exit(process.limit_exit(main(sys.argv[1:])))
