#!/usr/bin/env bash
# From a fresh checkout to answers: installs into a virtual environment, retrieves, stores the passages' KV, answers by
# blending, and compares that with full prefill. Needs Python 3.11+ and about 3 GB of disk, no GPU.
#
#   bash scripts/quickstart.sh          # 30 questions
#   bash scripts/quickstart.sh --all    # all of the data set
#   MODEL_ID=model.gguf DATASET=hotpot_dev_distractor_v1.json bash scripts/quickstart.sh
#
# VENV         the environment's folder (.venv)
# PYTHON       the interpreter that makes it (python3)
# DATASET      data set file (inputs/musique_s.json)
# MODEL_ID     model (inputs/demo-model-reuse)
# MAX_SAMPLES  use only the first samples (30)
# RESULTS_DIR  where to write (results)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
if [[ "${1:-}" == --all ]]; then
  MAX_SAMPLES=0
  shift
fi
no_arguments "${BASH_SOURCE[0]}" "$@"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
check_variables
VENV=${VENV:-.venv}
export DATASET=${DATASET:-inputs/musique_s.json} MODEL_ID=${MODEL_ID:-inputs/demo-model-reuse} MAX_SAMPLES=${MAX_SAMPLES:-30}
RESULTS_DIR=${RESULTS_DIR:-results}
name="$(basename "$DATASET" .json)"

install_into "$VENV" bench # with matplotlib, which draws timelines and the pictures of benchmarks
export PYTHON="$VENV/bin/python"

echo "== 1. retrieval"
MODEL_ID='' OUTPUT_DIR="$RESULTS_DIR/retrieval" bash scripts/retrieval/run_retrieval.sh
echo "== 2. KV of every passage"
retrieval_json="$(ls -t "$RESULTS_DIR/retrieval/${name}"_rag_both_k*.json | head -1)"
RETRIEVAL_JSON="$retrieval_json" OUTPUT_DIR="$RESULTS_DIR/kv_caches" bash scripts/build_kv_cache.sh
echo "== 3. answers over all passages, the best ones on the GPU if there is one"
RETRIEVAL_JSON="$retrieval_json" LOAD_CACHE_DIR="$RESULTS_DIR/kv_caches" \
  OUTPUT="$RESULTS_DIR/decoding/speculative_trace.json" bash scripts/decoding/run_speculative_decode.sh
echo "== 4. comparison over all passages"
"$PYTHON" -m benchmarks.compare --dataset "$DATASET" --model-id "$MODEL_ID" --max-samples "$MAX_SAMPLES" \
  ${DATASET_STYLE:+--dataset-style "$DATASET_STYLE"} ${INSTRUCTION:+--instruction "$INSTRUCTION"} \
  ${TEMPLATE:+--template "$TEMPLATE"} \
  --load-cache-dir "$RESULTS_DIR/kv_caches" --output "$RESULTS_DIR/comparison/$name.json"

echo
echo "written:"
ls "$retrieval_json" "$RESULTS_DIR/kv_caches/${name}"_kv_top*.json "$RESULTS_DIR/decoding/speculative_trace.json" \
  "$RESULTS_DIR/comparison/$name.json"
echo "$RESULTS_DIR/kv_caches/<sample_chunk_id>/ ($(find "$RESULTS_DIR/kv_caches" -name metadata.json | wc -l) chunks," \
  "$(du -sh "$RESULTS_DIR/kv_caches" | cut -f1))"
