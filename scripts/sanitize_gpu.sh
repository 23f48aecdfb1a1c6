#!/usr/bin/env bash
# Runs the tests of the CUDA kernels under compute-sanitizer on a GPU, one by one, and prints a line for each.
#
#   bash scripts/sanitize_gpu.sh
#
# PYTHON     the interpreter (python3); it has this checkout's requirements, pytest and hypothesis
# SANITIZER  the program (compute-sanitizer)
# TOOLS      which of its tools ("memcheck racecheck")
# CASES      of each test, evenly spread over its cases (all): under the sanitizer each takes many times as long
# ONLY       a word that the tests to run must contain, for example "decode"
# JOBS       tests at a time (4): they share the GPU
# PATIENCE   seconds until a test is given up (900)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
no_arguments "${BASH_SOURCE[0]}" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SANITIZER=${SANITIZER:-compute-sanitizer}
command -v "$SANITIZER" >/dev/null || {
  echo "$SANITIZER was not found: it comes with the CUDA toolkit; put it into PATH, or name it in SANITIZER" >&2
  exit 1
}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CASES=${CASES:-0}
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT

# Whether a log has no failed test and no race but those that racecheck reports within cuBLAS's products, as of their
# barriers it does not know all.
races_of_cublas_alone() {  # races_of_cublas_alone LOG
  grep -qE ' access at nvjet_' "$1" && ! grep -E '^========= .* access at ' "$1" | grep -qv ' access at nvjet_' &&
    ! grep -qE '(failed|error).* in ' "$1"
}

check() {  # check TOOL TEST
  local log start=$SECONDS outcome=clean
  log="$logs/$1-$(basename "${2//::/-}")"
  # Not torch's own kernels: the references in plain torch launch thousands, and take most of the time. What cuBLAS runs
  # stays in: its products fail under racecheck when they are left out.
  timeout "${PATIENCE:-900}" "$SANITIZER" --tool "$1" --error-exitcode 9 --kernel-name-exclude kns=_ZN2at \
    "${PYTHON:-python3}" -m pytest -p no:cacheprovider -m gpu "$2" >"$log" 2>&1 || outcome="FAILED ($?)"
  if [[ $1 == racecheck && $outcome == 'FAILED (9)' ]] && races_of_cublas_alone "$log"; then
    outcome='clean but for cuBLAS'
  fi
  if [[ $outcome == FAILED* ]]; then
    touch "$logs/failed"
    grep -m 20 -A 8 -E '^========= (Invalid|Error|Warning|Program|Potential|Race|Uninit)' "$log" || true
    grep -m 20 -E '^(E  |tests/.*Error|Falsifying)' "$log" || tail -n 20 "$log"
  fi
  echo "$outcome  $1 $2 ($((SECONDS - start)) s): $(grep -E 'SUMMARY|(passed|failed|error).* in ' "$log" | paste -sd ' ')"
}

mapfile -t tests < <("${PYTHON:-python3}" -m pytest -p no:cacheprovider -o addopts= -m gpu --collect-only -q tests/ops_gpu |
  grep '::' | sed 's/\[.*//' | uniq | grep -F -- "${ONLY:-}")
[[ ${#tests[@]} -gt 0 ]] || { echo "no test in tests/ops_gpu has ONLY=${ONLY:-} in its name" >&2; exit 1; }
for tool in ${TOOLS:-memcheck racecheck}; do
  for test in "${tests[@]}"; do
    while [[ $(jobs -rp | wc -l) -ge ${JOBS:-4} ]]; do wait -n || true; done
    check "$tool" "$test" &
  done
done
wait
[[ ! -e "$logs/failed" ]]
