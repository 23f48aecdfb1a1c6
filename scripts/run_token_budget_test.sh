#!/usr/bin/env bash
# How many chunks of KV cache fit beside a model in GPU and CPU memory, and what context that makes.
#
#   bash scripts/run_token_budget_test.sh
#   MODEL=mistralai/Mistral-7B-Instruct-v0.2 GPU_MEMORY=80GiB CHUNK_TOKENS=512 bash scripts/run_token_budget_test.sh
#
# Each variable below is the flag of the same name; further flags may follow the script's name. Relative paths are relative
# to the project root. --help explains them and has the defaults.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

flags_from_env MODEL DTYPE GPU_MEMORY CPU_MEMORY CHUNK_TOKENS RESERVE_TOKENS BLOCK_SIZE GPU_MEMORY_UTILIZATION OUTPUT
exec "$PYTHON" -m vllm_blend.pipeline.token_budget_calculator ${FLAGS[@]+"${FLAGS[@]}"} "$@"
