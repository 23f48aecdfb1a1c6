#!/usr/bin/env bash
# Runs tests of vLLM's own, from its source distribution on PyPI, against this package.
#
#   bash tests/integrations/vllm_own_tests/run.sh
#   bash tests/integrations/vllm_own_tests/run.sh -k priority
#
# Arguments go to pytest. docs/vllm_tests.md says which of these tests pass, and why the others do not.
# PYTHON  an interpreter in whose environment this checkout is installed (.venv/bin/python)
# WORK    the folder for the download and the tests (a folder named vllm-own-tests under /tmp)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
PYTHON=$(realpath --no-symlinks "${PYTHON:-.venv/bin/python}")
WORK=${WORK:-${TMPDIR:-/tmp}/vllm-own-tests}
"$PYTHON" -c "import vllm_blend, vllm; assert vllm.LLM is vllm_blend.LLM, 'vllm is not this package'"
"$PYTHON" -m tests.integrations.vllm_own_tests.prepare "$WORK"
cd "$WORK"
export VLLM_OWN_TESTS_MODEL="$PWD/model" VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-0.25}"
exec "$PYTHON" -m pytest -c tests/pytest.ini --rootdir . -q -rA --tb line --continue-on-collection-errors \
  tests/entrypoints/llm tests/samplers tests/v1/sample/test_sampling_params_e2e.py tests/v1/e2e/test_min_tokens.py "$@"
