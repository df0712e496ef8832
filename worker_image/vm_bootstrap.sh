#!/bin/sh
# Install spotfit on a machine without containers and start the agent, as the calling user:
#
#   vm_bootstrap.sh cpu|cuda WHEEL [COMMAND...]
#
# WHEEL is a file, a URL or a requirement (spotfit==0.1.0). Without a COMMAND the agent is started;
# options without a command are passed to it: `vm_bootstrap.sh cpu WHEEL --check`. An installation of
# the same pins and wheel is reused. Concurrent calls are serialized by a lock.
#
#   SPOTFIT_VENV     virtual environment      (~/.local/share/spotfit/venv)
#   SPOTFIT_TORCH    index of torch's builds without CUDA (PyTorch's; empty uses PyPI)
#   SPOTFIT_PYTHON   interpreter              (the first usable of python3.11, 3.12, 3.13, python3)
set -eu

refuse() {
    echo "$1" >&2
    echo "  What to do: $2" >&2
    exit 64
}

[ "$#" -ge 2 ] || refuse "vm_bootstrap.sh needs two arguments, not $#." "Pass cpu or cuda, and a wheel."
kind=$1 wheel=$2
shift 2
pins=$(dirname "$0")/constraints/$kind.txt
[ -f "$pins" ] || refuse "$pins does not exist." "Copy constraints/ next to this script."
index=
[ "$kind" = cuda ] || index=${SPOTFIT_TORCH-https://download.pytorch.org/whl/cpu}
venv=${SPOTFIT_VENV:-$HOME/.local/share/spotfit/venv}

is_usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    for python in ${SPOTFIT_PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if is_usable "$python"; then
            command -v "$python"
            return
        fi
    done
    refuse "None of ${SPOTFIT_PYTHON:-python3.11, python3.12, python3.13, python3} is Python 3.11 or newer with venv." \
        "Install it (Debian and Ubuntu: apt install python3.11-venv), or set SPOTFIT_PYTHON."
}

# A hash of the interpreter version, the pins and the wheel.
installation_hash() {
    { "$1" --version; cat "$pins"; echo "$wheel"; if [ -f "$wheel" ]; then cat "$wheel"; fi; } \
        | sha256sum | cut -d' ' -f1
}

install() {
    echo "Installing spotfit into $venv." >&2
    "$1" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --no-deps \
        ${index:+--extra-index-url "$index"} "$(grep '^torch==' "$pins")"
    "$venv/bin/python" -m pip install --quiet --no-deps --requirement "$pins"
    "$venv/bin/python" -m pip install --quiet --no-deps "$wheel"
    "$venv/bin/python" -m pip check >&2
    echo "$2" >"$venv/.installed"
}

python=$(find_python)
mkdir -p "$(dirname "$venv")"
(
    flock 9
    hash=$(installation_hash "$python")
    if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$hash" ]; then install "$python" "$hash"; fi
) 9>"$venv.lock"

if [ "$#" -eq 0 ] || [ "${1#-}" != "$1" ]; then
    set -- python -m spotfit.agent "$@"
fi
PATH=$venv/bin:$PATH
export PATH
exec "$@"
