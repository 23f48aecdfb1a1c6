#!/usr/bin/env bash
# Makes an environment for RAGatouille (once) and runs the tests of the colbert backend in it. Further arguments go to pytest.
#
#   bash tests/colbert/run.sh
#
# COLBERT_VENV  the environment's folder (.venv-colbert)
# PYTHON        the interpreter that makes it (python3); needs its headers, and a C++ compiler
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
COLBERT_VENV="${COLBERT_VENV:-.venv-colbert}"
if [[ ! -x "$COLBERT_VENV/bin/pytest" ]]; then
  "${PYTHON:-python3}" -m venv "$COLBERT_VENV"
  "$COLBERT_VENV/bin/pip" install -r requirements-colbert.txt pytest
fi
exec "$COLBERT_VENV/bin/python" -m pytest tests/colbert/colbert_checks.py "$@"
