#!/usr/bin/env bash
# Runs the tests that a GPU is needed for, on one, and prints a line for each part: the engine, blend, model, entrypoint and
# speculative decoding tests with every installed attention backend in every dtype that it takes, then those marked gpu.
#
#   bash scripts/test_gpu.sh
#
# PYTHON    the interpreter (python3); it has this checkout's requirements, pytest and hypothesis
# JOBS      parts that run at a time (half the cores): small tests leave most of a GPU idle
# ONLY      a word that the parts to run must contain, for example "bfloat16" or "gpu"
# PATIENCE  seconds until a part is given up (600)
# LINES_SHOWN  of the output of a part that failed (100)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
no_arguments "${BASH_SOURCE[0]}" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-$(($(nproc) / 2 > 0 ? $(nproc) / 2 : 1))}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT

part() {  # part NAME ARGUMENTS...: run pytest, print a line about it, and before that what went wrong
  local log="$logs/${1//[^a-z0-9_]/-}" start=$SECONDS outcome=passed
  timeout "${PATIENCE:-600}" "$PYTHON" -m pytest -p no:cacheprovider --tb=short --maxfail=5 "${@:2}" >"$log" 2>&1 ||
    outcome=FAILED
  if [[ $outcome == FAILED ]]; then
    touch "$logs/failed"
    sed -n '/^=.* \(FAILURES\|ERRORS\) =/,$p' "$log" | head -n "${LINES_SHOWN:-100}"
  fi
  echo "$outcome  $1 ($((SECONDS - start)) s): $(grep -E '^(largest|excused|FAILED: )|(passed|failed|error).* in ' "$log" |
    tail -n 3 | paste -sd ' ')"
}

without_redis="" on_gpu="gpu"
if ! command -v redis-server >/dev/null; then
  echo "redis-server is not installed: the tests that start one are left out (Debian and Ubuntu: apt install redis-server)"
  without_redis=" and not redis"
fi
if [[ "$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')" -lt 2 ]]; then
  echo "there is one GPU: the tests that need two are left out"
  on_gpu="gpu and not two_gpus"
fi
mapfile -t combinations < <("$PYTHON" -m tests.gpu.combinations)
[[ ${#combinations[@]} -gt 0 ]] || { echo "no attention backend works on this GPU" >&2; exit 1; }
for combination in "${combinations[@]}"; do
  read -r backend dtype <<<"$combination"
  for what in engine blend features/spec_decode "models tests/entrypoints"; do
    name="$backend $dtype tests/$what"
    [[ $name == *"${ONLY:-}"* ]] || continue
    while [[ $(jobs -rp | wc -l) -ge $JOBS ]]; do wait -n || true; done
    # shellcheck disable=SC2086
    part "$name" -m "not gpu$without_redis" --device cuda --dtype "$dtype" --attention-backend "$backend" tests/$what &
  done
done
wait
# Alone: some of these measure the memory that is free.
[[ "gpu" != *"${ONLY:-}"* ]] || part "gpu" -m "$on_gpu$without_redis" tests
[[ -n "$(ls "$logs")" ]] || { echo "no part has ONLY=${ONLY:-} in its name" >&2; exit 1; }
[[ ! -e "$logs/failed" ]]
