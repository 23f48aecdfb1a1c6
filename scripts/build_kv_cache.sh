#!/usr/bin/env bash
# Stage 2: compute and store the KV of every passage -> results/kv_caches/<dataset>_kv_top<k>.json, and a folder per chunk
#
#   bash scripts/build_kv_cache.sh
#   DATASET=inputs/wikimqa_s.json TOP_K=8 MODEL_ID=my-model bash scripts/build_kv_cache.sh
#
# A second run computes only what is missing. Each variable below is the flag of the same name (TOP_K: --top-k); further
# flags may follow the script's name. Relative paths are relative to the project root. --help explains them and has the
# defaults.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

flags_from_env CONFIG DATASET DATASET_STYLE INSTRUCTION TEMPLATE TOP_K MODEL_ID DTYPE DEVICE RETRIEVAL_JSON TOP_K_GPU \
  PAGES MAX_SAMPLES OUTPUT_DIR
exec "$PYTHON" -m vllm_blend.pipeline.build_kv_cache ${FLAGS[@]+"${FLAGS[@]}"} "$@"
