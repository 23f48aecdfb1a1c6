# Sourced by the scripts of the pipeline's stages, which may be started from anywhere: goes to the project root, picks the
# Python to use, and turns environment variables into flags.
#
# PYTHON  the interpreter; by default the project's .venv, else python3

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
if [[ -z "${PYTHON:-}" ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
if [[ -z "${VARIABLES_CHECKED:-}" ]]; then "$PYTHON" scripts/check_variables.py; fi
export VARIABLES_CHECKED=1 # a script that starts others says it once

# flags_from_env NAME...: fill FLAGS with "--name value" for each variable that is set and not empty (TOP_K=8: --top-k 8).
# The defaults stay where the flags are defined, in Python.
flags_from_env() {
  local name flag
  FLAGS=()
  for name in "$@"; do
    if [[ -n "${!name:-}" ]]; then
      flag="$(tr 'A-Z_' 'a-z-' <<<"$name")"
      FLAGS+=("--$flag" "${!name}")
    fi
  done
}
