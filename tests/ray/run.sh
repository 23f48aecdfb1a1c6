#!/usr/bin/env bash
# Installs this checkout and Ray into a virtual environment of their own, and checks what runs on Ray: the application for
# Ray Serve with two replicas. The files are called check_*.py, which pytest collects only when they are named: the other
# environments do not have Ray, which needs 400 MB.
#
#   bash tests/ray/run.sh
#   bash tests/ray/run.sh -k router
#
# Arguments go to pytest.
# RAY_VENV  the environment's folder (.venv-ray)
# PYTHON    the interpreter that makes it (python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh
venv=${RAY_VENV:-.venv-ray}
packages=tests/ray/requirements.txt

install_into "$venv" structured,server
stamp="$(cat requirements.txt "$packages" | cksum)"
if [[ "$(cat "$venv/.ray" 2>/dev/null)" != "$stamp" ]]; then
  install_with "$venv" --requirement "$packages" --constraint requirements.txt
  echo "$stamp" >"$venv/.ray"
fi
export RAY_USAGE_STATS_ENABLED=0
# Tests of what needs no Ray run here, too: their modules must work beside it.
"$venv/bin/python" -m pytest tests/ray/check_*.py tests/ray/test_*.py "$@"
