"""Pure rendering of the plan and of the shell scripts for hosts; checked against golden files.

Scripts are passed on stdin, so that secrets appear in no command line and no file. They need only
a POSIX shell on Linux, and flock and setsid of util-linux. The kernel releases the lock of a host
when its holder ends, so locks are never stale.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from spotfit.core.errors import ConfigError
from spotfit.model.group import GroupPlan, GroupRequest
from spotfit.provision.launch import AGENT_COMMAND, count_nodes
from spotfit.provision.offers import select_offer
from spotfit_provisioners.job_fields import hardware
from spotfit_provisioners.ssh.offers import list_offers
from spotfit_provisioners.ssh.options import SshOptions

BACKEND = "ssh"
MARKER_VARIABLE = "SPOTFIT_SSH_MACHINE"
"""Set in the environment of an agent and its descendants to the path of its machine directory. The
path ends with a slash, so that no value is a prefix of another one. See decision 0026."""
LOG_RETENTION_DAYS = 7
"""How long a host keeps the output of agents."""
MIN_FREE_GIB = 5
_UNSAFE = re.compile(r"[^A-Za-z0-9.-]")


def plan(request: GroupRequest, options: SshOptions) -> GroupPlan:
    """Return the hosts, the agent's command and environment. Raises `ConfigError`."""
    if not options.hosts:
        raise ConfigError(
            "SshOptions(hosts=…) is not set: there are no hosts to run on.",
            do="Set SshOptions(hosts=('gpu1', 'gpu2')) in the call, SPOTFIT_SSH_HOSTS, or hosts "
            "under [ssh] in spotfit.toml.",
        )
    hardware.check_resources(request.resources_per_worker, backend="ssh")
    if "\n" in options.command_prefix + options.python:
        raise ConfigError(
            f"SshOptions(command_prefix={options.command_prefix!r}, python={options.python!r}) "
            "must not contain line breaks.",
            do="Remove the line breaks; shell lines belong in setup=(…).",
        )
    select_offer(
        request,
        list_offers(options).offers,
        do="Hosts have one offer; list it again after changes of SshOptions(prices=…).",
    )
    slots = options.workers_per_node
    nodes = count_nodes(request, slots=slots, max_nodes=len(options.hosts), backend="ssh")
    body: dict[str, Any] = {
        "hosts": list(options.hosts),
        "agent": _shell_lines(
            options, f"exec {_interpreter(options)} {' '.join(AGENT_COMMAND[1:])}"
        ),
        "environment": {"SPOTFIT_SIGNAL_GRACE_S": str(options.grace_s), **options.environment},
    }
    return GroupPlan(
        token=request.token, provisioner=BACKEND, num_nodes=nodes, slots_per_node=slots, body=body
    )


def machine_path(state_dir: str, host: str, token: str, node: int) -> str:
    """Return the machine directory. It contains the host's name: hosts may share a home."""
    return f"{state_dir}/{_UNSAFE.sub('_', host)}/{token}.{node}"


def host_status_script(machine_dir: str, availability_command: str) -> str:
    """Return a script that prints the status of the host.

    Prints 'free', 'busy', 'closed' or 'occupied'; the exit code of the last agent, or '-'; then the
    indexes of the machines of the group that the host has.
    """
    # Without the descriptor of the lock: a background process of the command would keep it.
    availability_check = (
        f"( {availability_command}\n) >/dev/null 2>&1 </dev/null 9>&-"
        if availability_command
        else "true"
    )
    return f"""{_prologue(machine_dir)}
if any_alive; then state=busy
elif [ -e "$root.closed" ]; then state=closed
elif {availability_check}; then state=free
else state=occupied
fi
last=$(ls -t "$root" | head -n 1)
code=$([ -z "$last" ] || cat "$root/$last/code" 2>/dev/null)
echo "$state" "${{code:--}}"
for one in "${{place%.*}}".*; do
    if [ -e "$one" ]; then echo "${{one##*.}}"; fi
done
"""


def start_script(machine_dir: str, agent: str, environment: Mapping[str, str]) -> str:
    """Return a script that starts an agent.

    Prints 'started'; 'known' if the machine directory exists already; 'busy' if another agent runs
    on the host. A shell supervises the agent: it forwards SIGTERM, and after the agent's exit it
    kills remaining processes and writes the exit code.
    """
    # Descriptor 9 is the lock, which must not be inherited by the agent. The environment variable
    # SPOTFIT_SSH_AGENT holds the command, because quoting it a second time would be unreadable.
    exports = "\n".join(f"export {name}={shlex.quote(environment[name])}" for name in environment)
    return f"""{_prologue(machine_dir)}
if [ -e "$place" ]; then echo known; exit; fi
if any_alive; then echo busy; exit; fi
find "$root" -mindepth 1 -maxdepth 1 -mtime +{LOG_RETENTION_DAYS} -exec rm -rf {{}} +
mkdir "$place" || exit 1
{exports}
export {MARKER_VARIABLE}="$mark"
SPOTFIT_SSH_AGENT={shlex.quote(agent)} setsid sh -c '
    command=$SPOTFIT_SSH_AGENT agent= noticed=
    unset SPOTFIT_SSH_AGENT
    echo $$ > "$1/pid"
    trap "noticed=1; [ -z \\"\\$agent\\" ] || kill -s TERM \\$agent 2>/dev/null" TERM
    ( umask "$3"; eval "$command" ) & agent=$!
    [ -z "$noticed" ] || kill -s TERM $agent 2>/dev/null
    while :; do  # a signal interrupts wait
        wait $agent
        code=$?
        kill -0 $agent 2>/dev/null || break
    done
    wait $agent 2>/dev/null
    again=$?  # some shells return the code only on the second wait
    [ $again = 127 ] || code=$again
    {_PROCESS_FUNCTIONS}
    kill_all "$2" $$
    echo $code > "$1/code"
' spotfit-ssh "$place" "$mark" "$mask" </dev/null >"$place/log" 2>&1 9>&- &
until [ -s "$place/pid" ]; do sleep 0.02; done
echo started
"""


def machine_status_script(machine_dir: str) -> str:
    """Return a script that prints the status of a machine.

    Prints 'running', 'over' with the exit code if known, or 'unknown'; then when the agent started
    and ended, by the clock of the host in seconds since 1970, as far as recorded.
    """
    return f"""{_prologue(machine_dir)}
if alive "$mark"; then echo running
elif [ -e "$place" ]; then echo over "$(cat "$place/code" 2>/dev/null)"
else echo unknown
fi
stat -c %Y "$place/pid" "$place/code" 2>/dev/null || true
"""


def tail_script(machine_dir: str, max_lines: int) -> str:
    """Return a script that prints the last lines of an agent's output, or nothing."""
    return f"tail -n {max_lines} {shlex.quote(machine_dir)}/log 2>/dev/null || true"


def stop_script(machine_dir: str, grace_s: float) -> str:
    """Return a script that sends SIGTERM, and SIGKILL to remaining processes after `grace_s`."""
    return f"""{_prologue(machine_dir)}
if alive "$mark"; then
    kill -s TERM "$(cat "$place/pid")" 2>/dev/null
    setsid sh -c '{_PROCESS_FUNCTIONS}
        waited=0
        while [ $waited -lt {max(1, round(grace_s))} ] && alive "$1"; do
            sleep 1
            waited=$((waited + 1))
        done
        kill_all "$1"
    ' spotfit-ssh-end "$mark" </dev/null >/dev/null 2>&1 9>&- &
fi
"""


def remove_script(machine_dir: str) -> str:
    """Return a script that kills a machine, waits for its end and deletes its directory.

    Afterwards the same group can be submitted again. The directory of a machine whose processes do
    not end stays: the next submission finds the machine.
    """
    return f"""{_prologue(machine_dir)}
if kill_all "$mark"; then rm -rf "$place"; fi
"""


def check_script(options: SshOptions) -> str:
    """Return a script that prints versions and free disk space, or fails naming what is missing.

    It runs the interpreter with the same setup and environment as an agent.
    """
    # One program, because an interpreter in a container may take seconds to start.
    program = (
        "import platform, shutil, tempfile, spotfit; from importlib.metadata import version; "
        "free = shutil.disk_usage(tempfile.gettempdir()).free / 2**30; "
        "print('Python', platform.python_version() + ', spotfit', version('spotfit') "
        f"+ ', %.0f GiB free' % free); raise SystemExit(free < {MIN_FREE_GIB} and "
        f"'Less than {MIN_FREE_GIB} GiB are free in the temporary directory.')"
    )
    agent = _shell_lines(options, f"exec {_interpreter(options)} -c {shlex.quote(program)}")
    exports = "\n".join(f"export {n}={shlex.quote(v)}" for n, v in options.environment.items())
    directory = machine_path(options.state_dir, "checkup", token="t-checkup", node=0)  # noqa: S106
    return f"""for one in flock setsid grep find; do
    command -v "$one" >/dev/null || {{ echo "The command $one is missing." >&2; exit 1; }}
done
[ -r /proc/self/environ ] || {{ echo "/proc is missing: not a Linux host." >&2; exit 1; }}
{_prologue(directory)}
{exports}
( {agent}
) </dev/null
"""


def reachability_script(ssh_arguments: Iterable[str], other: str) -> str:
    """Return a script that connects to another host; prints 'reached' or the error."""
    command = shlex.join(("ssh", *ssh_arguments, "-T", "--", other, "true"))
    return f"{command} </dev/null 2>&1 && echo reached || true"


def _interpreter(options: SshOptions) -> str:
    return " ".join(filter(None, (options.command_prefix, options.python)))


def _shell_lines(options: SshOptions, last: str) -> str:
    return "\n".join((*options.setup, last))


# At least 5 s. A process that waits for a disk or a device ends only afterwards.
_MAX_KILL_PASSES = 100

# A machine is alive while any process has its marker in its environment. Process groups and
# sessions can be left by descendants, and process ids are reused.
_PROCESS_FUNCTIONS = f"""
alive() {{ grep -qsF "{MARKER_VARIABLE}=$1" /proc/[0-9]*/environ; }}
kill_all() {{  # until none is left: a killed process still runs until it is scheduled
    passes=0
    while [ $passes -lt {_MAX_KILL_PASSES} ]; do
        passes=$((passes + 1)) found=
        for one in $(grep -lsF "{MARKER_VARIABLE}=$1" /proc/[0-9]*/environ); do
            one=${{one#/proc/}} one=${{one%/environ}}
            [ "$one" = "$2" ] || ! kill -s KILL "$one" 2>/dev/null || found=1
        done
        # At least twice: a process that is being forked may be missed the first time.
        [ -n "$found" ] || [ $passes -lt 2 ] || return 0
        sleep 0.05
    done
    return 1
}}"""


def _prologue(machine_dir: str) -> str:
    """Return the common start of the scripts: take the host's lock and define functions."""
    machine = machine_dir.rpartition("/")[2]
    return f"""mask=$(umask)
umask 077
place={shlex.quote(machine_dir)}
root=${{place%/*}}
mkdir -p "$root" && exec 9>"${{root%/*}}/lock-${{root##*/}}" && flock 9 || exit 1
here=$(cd "$root" && pwd -P)
mark=$here/{machine}/{_PROCESS_FUNCTIONS}
any_alive() {{ alive "$here/"; }}"""
