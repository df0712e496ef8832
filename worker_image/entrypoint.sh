#!/bin/sh
# What a container begins with: the agent, or the command that a cloud says in its place.
#
# It is replaced (`exec`) by what it starts: signals reach the agent itself, and its exit code is the
# container's. Options alone are the agent's: `docker run IMAGE --check`.
set -eu

if [ "$#" -eq 0 ] || [ "${1#-}" != "$1" ]; then
    set -- python -m spotfit.agent "$@"
fi
exec "$@"
