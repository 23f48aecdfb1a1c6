#!/usr/bin/env bash
# Installs this checkout with its CPU kernels into a virtual environment and runs the tests that need no GPU.
#
#   bash scripts/test.sh                       # tests/, and notebooks/ from top to bottom
#   bash scripts/test.sh tests/pipeline -x
#
# Arguments go to pytest; with any of them the notebooks are left out unless they name them (--nbmake notebooks).
# VENV          the environment's folder (.venv-test)
# PYTHON        the interpreter that makes it (python3)
# TEST_WORKERS  processes that share the tests when all are run (2): each keeps one core busy and takes up to 2 GB with the
#               processes that it starts
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
answer_help "${BASH_SOURCE[0]}" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
VENV=${VENV:-.venv-test}

install_into "$VENV" dev
marks="not gpu"
if ! command -v redis-server >/dev/null; then
  echo "redis-server is not installed: the tests that start one are left out (Debian and Ubuntu: apt install redis-server)"
  marks="not gpu and not redis"
fi
if (($# == 0)); then
  export NOTEBOOK_QUESTIONS="${NOTEBOOK_QUESTIONS:-2}" # of each comparison: here they only have to run
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MALLOC_ARENA_MAX="${MALLOC_ARENA_MAX:-2}"
  # A file's tests stay together, since they share engines, and so do a folder's, since they share servers.
  set -- --numprocesses="${TEST_WORKERS:-2}" --dist=loadfile --no-loadscope-reorder --nbmake --nbmake-timeout=300 tests notebooks
fi
exec "$VENV/bin/python" -m pytest -m "$marks" "$@"
