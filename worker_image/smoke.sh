#!/bin/sh
# Start an image as a cloud does, and check its guarantees: smoke.sh IMAGE
#
# Works with any image. DOCKER names docker or podman.
set -eu

image=$1
docker=${DOCKER:-docker}

fail() {
    echo "$image: $1" >&2
    exit 1
}

report=$("$docker" run --rm "$image" python -m spotfit.agent --check) \
    || fail "the agent cannot run in it: $report"
case $report in
*'"user":0,'*) fail "the agent runs as root; set USER in the Dockerfile" ;;
esac

code=0
"$docker" run --rm "$image" python -m spotfit.agent >/dev/null 2>&1 || code=$?
[ "$code" -eq 64 ] || fail "an agent without a run exited with $code instead of 64"

# shellcheck disable=SC2016 # expanded by Python, in the container
wait_for='import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
print("up", flush=True)
time.sleep(60)'
name=spotfit-smoke-$$
"$docker" run --name "$name" "$image" python -c "$wait_for" >/dev/null &
until "$docker" logs "$name" 2>/dev/null | grep -q up; do sleep 0.2; done
"$docker" stop --time 20 "$name" >/dev/null
code=0
wait $! || code=$?
"$docker" rm "$name" >/dev/null
[ "$code" -eq 85 ] || fail "SIGTERM did not reach the command: it exited with $code instead of 85"

echo "$image passed: $report"
