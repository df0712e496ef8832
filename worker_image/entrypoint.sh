#!/bin/sh
# Entry point of the container: starts the agent, or the command that the cloud passes.
#
# `exec` replaces the shell, so that signals reach the agent and its exit code is that of the
# container. Options without a command are passed to the agent: `docker run IMAGE --check`.
set -eu

if [ "$#" -eq 0 ] || [ "${1#-}" != "$1" ]; then
    set -- python -m spotfit.agent "$@"
fi
exec "$@"
