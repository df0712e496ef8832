"""What hosts are told, as shell that goes in by stdin: no secret is in any command line or file.

Everything is plain sh on Linux, with flock and setsid of util-linux.
The lock of a host is held by the kernel and goes with whoever held it, so that none is ever stale.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.launch import COMMAND
from spotfit.provision.sizing import nodes_for
from spotfit_provisioners.kit import hardware
from spotfit_provisioners.ssh.options import SshOptions

BACKEND = "ssh"
MARK = "SPOTFIT_SSH_MACHINE"
"""In the environment of an agent and of all that is below it: the place where its host notes it, a
slash at its end so that no mark begins another."""
KEPT_DAYS = 7
"""For how long a host keeps what an agent has printed."""
LEAST_FREE_GIB = 5
_UNSAFE = re.compile(r"[^A-Za-z0-9.-]")


def plan(request: GroupRequest, options: SshOptions) -> GroupPlan:
    """How many hosts, which may be taken, and what an agent is started by."""
    if not options.hosts:
        raise ConfigError(
            "SshOptions(hosts=…) is missing.",
            do="Say it in the call, in SPOTFIT_SSH_HOSTS, or under [ssh] in spotfit.toml.",
        )
    hardware.check(request.resources_per_worker, backend="ssh")
    if "\n" in options.container + options.python:
        raise ConfigError("SshOptions: container and python are one line each.")
    slots, most = options.workers_per_node, len(options.hosts)
    nodes = nodes_for(request, slots=slots, max_nodes=most, backend="ssh")
    body: dict[str, Any] = {
        "hosts": list(options.hosts),
        "agent": _lines(options, f"exec {_interpreter(options)} {' '.join(COMMAND[1:])}"),
        "environment": {
            "SPOTFIT_SIGNAL_GRACE_S": str(options.grace_s),
            **options.environment,
        },
    }
    return GroupPlan(request.token, BACKEND, nodes, slots, body)


def place_of(folder: str, host: str, token: str, node: int) -> str:
    """Where a host notes that machine: hosts may share a home."""
    return f"{folder}/{_UNSAFE.sub('_', host)}/{token}.{node}"


def survey(place: str, free_if: str) -> str:
    """Print 'free', 'busy', 'closed' or 'occupied'; then how the last agent there ended, or '-';
    then the numbers of the machines of that place's group that this host knows."""
    asked = f"( {free_if}\n) >/dev/null 2>&1 </dev/null 9>&-" if free_if else "true"
    return f"""{_prologue(place)}
if any_alive; then state=busy
elif [ -e "$root.closed" ]; then state=closed
elif {asked}; then state=free
else state=occupied
fi
last=$(ls -t "$root" | head -n 1)
code=$([ -z "$last" ] || cat "$root/$last/code" 2>/dev/null)
echo "$state" "${{code:--}}"
for one in "${{place%.*}}".*; do
    if [ -e "$one" ]; then echo "${{one##*.}}"; fi
done
"""


def start(place: str, agent: str, environment: Mapping[str, str]) -> str:
    """Start an agent there and print 'started'; 'known' if that place is taken by an agent of the
    same group and number, over or not; 'busy' if another agent runs on the host.

    A shell stays with the agent: it passes SIGTERM on, and once the agent has ended it ends what
    the agent left and notes the exit code.
    """
    exports = "\n".join(f"export {name}={shlex.quote(environment[name])}" for name in environment)
    return f"""{_prologue(place)}
if [ -e "$place" ]; then echo known; exit; fi
if any_alive; then echo busy; exit; fi
find "$root" -mindepth 1 -maxdepth 1 -mtime +{KEPT_DAYS} -exec rm -rf {{}} +
mkdir "$place" || exit 1
{exports}
export {MARK}="$mark"
SPOTFIT_SSH_AGENT={shlex.quote(agent)} setsid sh -c '
    command=$SPOTFIT_SSH_AGENT agent= noticed=
    unset SPOTFIT_SSH_AGENT
    echo $$ > "$1/pid"
    trap "noticed=1; [ -z \\"\\$agent\\" ] || kill -s TERM \\$agent 2>/dev/null" TERM
    ( umask "$3"; eval "$command" ) & agent=$!
    [ -z "$noticed" ] || kill -s TERM $agent 2>/dev/null
    while :; do  # a signal ends the waiting, too
        wait $agent
        code=$?
        kill -0 $agent 2>/dev/null || break
    done
    wait $agent 2>/dev/null
    again=$?  # a shell that has seen its end before it was asked knows the code only now
    [ $again = 127 ] || code=$again
    {_KILL}
    kill_all "$2" $$
    echo $code > "$1/code"
' spotfit-ssh "$place" "$mark" "$mask" </dev/null >"$place/log" 2>&1 9>&- &
until [ -s "$place/pid" ]; do sleep 0.02; done
echo started
"""


def look(place: str) -> str:
    """Print 'running', 'over' with the agent's exit code if it left one, or 'unknown'."""
    return f"""{_prologue(place)}
if alive "$mark"; then echo running
elif [ -e "$place" ]; then echo over "$(cat "$place/code" 2>/dev/null)"
else echo unknown
fi
"""


def tail(place: str, last: int) -> str:
    """Print the last lines of what an agent printed there; nothing where there is nothing."""
    return f"tail -n {last} {shlex.quote(place)}/log 2>/dev/null || true"


def stop(place: str, grace_s: float) -> str:
    """SIGTERM at once; later SIGKILL to whatever is left of it. What is over stays as it is."""
    return f"""{_prologue(place)}
if alive "$mark"; then
    kill -s TERM "$(cat "$place/pid")" 2>/dev/null
    setsid sh -c '{_KILL}
        waited=0
        while [ $waited -lt {max(1, round(grace_s))} ] && alive "$1"; do
            sleep 1
            waited=$((waited + 1))
        done
        kill_all "$1"
    ' spotfit-ssh-end "$mark" </dev/null >/dev/null 2>&1 9>&- &
fi
"""


def undo(place: str) -> str:
    """Kill it and forget it: a group that did not come about may be asked for again."""
    return f"""{_prologue(place)}
kill_all "$mark"
rm -rf "$place"
"""


def check(options: SshOptions) -> str:
    """Print what an agent would find; fail where something is missing, saying what.

    The interpreter is asked for spotfit itself, in the same surroundings as an agent's.
    """
    tell = (
        "import platform, shutil, tempfile, spotfit; from importlib.metadata import version; "
        "free = shutil.disk_usage(tempfile.gettempdir()).free / 2**30; "
        "print('Python', platform.python_version() + ', spotfit', version('spotfit') "
        f"+ ', %.0f GiB free' % free); raise SystemExit(free < {LEAST_FREE_GIB} and "
        f"'Less than {LEAST_FREE_GIB} GiB are free where the agent would run.')"
    )
    agent = _lines(options, f"exec {_interpreter(options)} -c {shlex.quote(tell)}")
    exports = "\n".join(f"export {n}={shlex.quote(v)}" for n, v in options.environment.items())
    return f"""for one in flock setsid grep find; do
    command -v "$one" >/dev/null || {{ echo "There is no $one." >&2; exit 1; }}
done
[ -r /proc/self/environ ] || {{ echo "There is no /proc: this is no Linux." >&2; exit 1; }}
{_prologue(place_of(options.folder, "checkup", "t-checkup", 0))}
{exports}
( {agent}
) </dev/null
"""


def reach(words: Iterable[str], other: str) -> str:
    """Have the host go to another one, as its agent would; print 'reached', or why not."""
    command = shlex.join(("ssh", *words, "-T", "--", other, "true"))
    return f"{command} </dev/null 2>&1 && echo reached || true"


def _interpreter(options: SshOptions) -> str:
    return " ".join(filter(None, (options.container, options.python)))


def _lines(options: SshOptions, last: str) -> str:
    return "\n".join((*options.setup, last))


_KILL = f"""
alive() {{ grep -qsF "{MARK}=$1" /proc/[0-9]*/environ; }}
kill_all() {{  # twice: who was being forked while we looked is there the second time
    for _ in 1 2; do
        for one in $(grep -lsF "{MARK}=$1" /proc/[0-9]*/environ); do
            one=${{one#/proc/}} one=${{one%/environ}}
            [ "$one" = "$2" ] || kill -s KILL "$one" 2>/dev/null
        done
    done
}}"""
"""A machine is alive as long as anything that bears its mark is, whatever groups and sessions it
has formed; numbers of processes, which are given out again, prove nothing."""


def _prologue(place: str) -> str:
    """One at a time on a host, and the words that the scripts share."""
    machine = place.rpartition("/")[2]
    return f"""mask=$(umask)
umask 077
place={shlex.quote(place)}
root=${{place%/*}}
mkdir -p "$root" && exec 9>"${{root%/*}}/lock-${{root##*/}}" && flock 9 || exit 1
here=$(cd "$root" && pwd -P)
mark=$here/{machine}/{_KILL}
any_alive() {{ alive "$here/"; }}"""
