#!/usr/bin/env bash
# All stages in one process: retrieval, the chunks' KV, the answers.
#
#   bash scripts/run_pipeline.sh
#   DATASET=inputs/wikimqa_s.json MAX_SAMPLES=20 bash scripts/run_pipeline.sh --set decode.passages=all
#
# Each variable below is the flag of the same name (TOP_K: --top-k); further flags may follow the script's name. Relative
# paths are relative to the project root. --help explains them and has the defaults.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

flags_from_env CONFIG DATASET DATASET_STYLE INSTRUCTION TEMPLATE MODEL_ID TOP_K MAX_SAMPLES RESULTS_DIR
exec "$PYTHON" -m vllm_blend.pipeline.run_pipeline ${FLAGS[@]+"${FLAGS[@]}"} "$@"
