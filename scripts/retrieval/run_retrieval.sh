#!/usr/bin/env bash
# Stage 1: retrieve the best passages of every question -> results/retrieval/<dataset>_rag_both_k<k>.json
#
#   bash scripts/retrieval/run_retrieval.sh
#   DATASET=inputs/wikimqa_s.json TOP_K=8 bash scripts/retrieval/run_retrieval.sh
#
# Each variable below is the flag of the same name (TOP_K: --top-k); further flags may follow the script's name. Relative
# paths are relative to the project root. --help explains them and has the defaults.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

flags_from_env CONFIG DATASET DATASET_NAME DATASET_PATH DATASET_STYLE INSTRUCTION TEMPLATE TOP_K BACKEND MODEL_ID \
  SCOPE INCLUDE_NEIGHBORS MAX_SAMPLES OUTPUT_DIR INDEX_DIR R_TEXT_INDEX_KEY DOC_KEY QUESTION_KEY RETRIEVED_KEY PAGE_ID_KEY
exec "$PYTHON" -m vllm_blend.pipeline.retrieval ${FLAGS[@]+"${FLAGS[@]}"} "$@"
