#!/usr/bin/env bash
# Runs the tests of the CUDA kernels under compute-sanitizer on a GPU, file by file, and prints a line for each.
#
#   bash scripts/sanitize_gpu.sh
#
# PYTHON     the interpreter (python3); it has this checkout's requirements, pytest and hypothesis
# SANITIZER  the program (compute-sanitizer)
# TOOLS      which of its tools ("memcheck racecheck")
# ONLY       a word that the files to run must contain, for example "decode"
# JOBS       files at a time (4): they share the GPU
# PATIENCE   seconds until a file is given up (900)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT

check() {  # check TOOL FILE
  local log start=$SECONDS outcome=clean
  log="$logs/$1-$(basename "$2" .py)"
  timeout "${PATIENCE:-900}" "${SANITIZER:-compute-sanitizer}" --tool "$1" --error-exitcode 9 \
    "${PYTHON:-python3}" -m pytest -p no:cacheprovider -m gpu "$2" >"$log" 2>&1 || outcome="FAILED ($?)"
  if [[ $outcome != clean ]]; then
    touch "$logs/failed"
    grep -m 20 -A 8 '^========= ' "$log" || tail -n 20 "$log"
  fi
  echo "$outcome  $1 $2 ($((SECONDS - start)) s): $(grep -E 'SUMMARY|(passed|failed|error).* in ' "$log" | paste -sd ' ')"
}

for tool in ${TOOLS:-memcheck racecheck}; do
  for file in tests/ops_gpu/test_*.py; do
    [[ $file == *"${ONLY:-}"* ]] || continue
    while [[ $(jobs -rp | wc -l) -ge ${JOBS:-4} ]]; do wait -n || true; done
    check "$tool" "$file" &
  done
done
wait
[[ ! -e "$logs/failed" ]]
