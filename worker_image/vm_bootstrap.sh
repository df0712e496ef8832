#!/bin/sh
# Make a bare machine ready and be its agent, as whoever calls this:
#
#   vm_bootstrap.sh cpu|cuda WHEEL [COMMAND...]
#
# WHEEL is a file, a URL or a requirement (spotfit==0.1.0). Without a COMMAND the agent is started;
# options alone are the agent's: `vm_bootstrap.sh cpu WHEEL --check`. What was installed before, from the
# same pins and the same wheel, is not installed again; two that come at once wait for each other.
#
#   SPOTFIT_VENV     where to install         (~/.local/share/spotfit/venv)
#   SPOTFIT_TORCH    the index of torch's builds without CUDA (PyTorch's own; empty asks PyPI)
#   SPOTFIT_PYTHON   the interpreter to take  (the first of python3.11, 3.12, 3.13, python3 that will do)
set -eu

refuse() {
    echo "$1" >&2
    echo "  What to do: $2" >&2
    exit 64
}

[ "$#" -ge 2 ] || refuse "vm_bootstrap.sh was given $# words." "Call it with cpu or cuda, and a wheel."
kind=$1 wheel=$2
shift 2
pins=$(dirname "$0")/constraints/$kind.txt
[ -f "$pins" ] || refuse "There are no pins $pins." "Copy constraints/ beside this script."
index=
[ "$kind" = cuda ] || index=${SPOTFIT_TORCH-https://download.pytorch.org/whl/cpu}
venv=${SPOTFIT_VENV:-$HOME/.local/share/spotfit/venv}

will_do() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

python_to_take() {
    for python in ${SPOTFIT_PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if will_do "$python"; then
            command -v "$python"
            return
        fi
    done
    refuse "None of ${SPOTFIT_PYTHON:-python3.11, python3.12, python3.13, python3} is Python 3.11 or newer with venv." \
        "Install one (Debian and Ubuntu: apt install python3.11-venv), or name it in SPOTFIT_PYTHON."
}

# What would be installed, in a word: another interpreter, pin or wheel is another word.
wanted() {
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

python=$(python_to_take)
mkdir -p "$(dirname "$venv")"
(
    flock 9
    word=$(wanted "$python")
    if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$word" ]; then install "$python" "$word"; fi
) 9>"$venv.lock"

if [ "$#" -eq 0 ] || [ "${1#-}" != "$1" ]; then
    set -- python -m spotfit.agent "$@"
fi
PATH=$venv/bin:$PATH
export PATH
exec "$@"
