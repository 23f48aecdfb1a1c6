#!/usr/bin/env bash
# Stage 3: answer over the stored KV, one token per engine step -> results/decoding/speculative_trace.json
#
#   bash scripts/decoding/run_speculative_decode.sh
#   bash scripts/decoding/run_speculative_decode.sh --load-cache-dir results/kv_caches --offload-mode resident --timeline
#   DATASET=inputs/wikimqa_s.json TOP_K=8 BLEND_RECOMPUTE_RATIO=0.3 bash scripts/decoding/run_speculative_decode.sh
#
# Each variable below is the flag of the same name (LOAD_CACHE_DIR: --load-cache-dir); further flags may follow the
# script's name. Relative paths are relative to the project root. --help explains them and has the defaults.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

flags_from_env CONFIG DATASET DATASET_STYLE INSTRUCTION TEMPLATE TOP_K MODEL_ID DTYPE DEVICE RETRIEVAL_JSON \
  LOAD_CACHE_DIR PASSAGES PAGES ORDER BLEND_SELECTOR BLEND_RECOMPUTE_RATIO OFFLOAD_MODE OFFLOAD_PREDICTOR RESIDENT_CHUNKS BYTES_PER_STEP DRAFT_TOKENS \
  ENABLE_KVC TARGET_COMPRESSION_RATE MAX_CACHE_TOKENS KVC_METRIC MAX_TOKENS MAX_SAMPLES OUTPUT TIMELINE
exec "$PYTHON" -m vllm_blend.pipeline.speculative_decode ${FLAGS[@]+"${FLAGS[@]}"} "$@"
