#!/bin/sh
# Build the image, and label it with its content:
#
#   worker_image/bake.sh cpu|cuda REPOSITORY [OPTION OF DOCKER BUILD...]
#
# The tag contains the versions that `fit()` compares before it rents machines:
# REPOSITORY:0.1.0-py3.11-torch2.13.0-cpu. The last line of output is the name of the image.
#
#   PYTHON   minor version of the caller of fit(), 3.11 to 3.13   (that of python3)
#   DOCKER   docker or podman                                     (docker)
#   PLATFORM platform of the machines                             (linux/amd64)
#   BUILD    number of a repeated build of one version; registries with immutable tags need it
#
# The default machines of all backends have x86-64 processors, whatever this computer has: an image
# for arm64 would end on them with "exec format error".
set -eu

kind=$1 repository=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
pins=$here/constraints/$kind.txt
python=${PYTHON:-$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')}

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$here/../pyproject.toml")
torch=$(sed -n 's/^torch==//p' "$pins")
platform=${PLATFORM:-linux/amd64}
image=$repository:$version-py$python-torch$torch-$kind${BUILD:+-b$BUILD}

"${DOCKER:-docker}" build \
    --platform "$platform" \
    --file "$here/Dockerfile.$kind" \
    --build-arg "PYTHON=$python" \
    --label "org.opencontainers.image.title=spotfit" \
    --label "org.opencontainers.image.version=$version" \
    --label "dev.spotfit.platform=$platform" \
    --label "dev.spotfit.python=$python" \
    --label "dev.spotfit.packages=$(grep -v '^#' "$pins" | tr '\n' ' ')" \
    --tag "$image" \
    "$@" "$here/.." >&2
echo "$image"
