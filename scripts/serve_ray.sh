#!/usr/bin/env bash
# Serves the engine on Ray Serve: several replicas, among which requests go where their passages are.
#
#   bash scripts/serve_ray.sh
#   CONFIG=my_cluster.yaml bash scripts/serve_ray.sh
#   bash scripts/serve_ray.sh model=inputs/demo-model-reuse replicas=2 num_cpus=0.5 ingress_cpus=0.5
#
# Arguments are options of docs/ray.md, NAME=VALUE, instead of a file. Ctrl-C ends the application, and Ray if this has
# started it.
# CONFIG  a YAML file of Ray Serve (configs/ray_serve.yaml)
# PYTHON  the interpreter; by default the project's .venv, else python3
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
answer_help "${BASH_SOURCE[0]}" "$@"
for argument in "$@"; do
  if [[ $argument != *=* ]]; then
    echo "error: '$argument' is no NAME=VALUE:" >&2
    print_usage "${BASH_SOURCE[0]}" >&2
    exit 2
  fi
done
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if ! "$PYTHON" -c 'import ray.serve' 2>/dev/null; then
  echo "error: Ray Serve is not installed for $PYTHON: run $PYTHON -m pip install 'vllm-blend[ray]'" >&2
  exit 2
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"  # Ray's workers import the package, too
if ((!$#)); then
  set -- "${CONFIG:-configs/ray_serve.yaml}"
fi
exec "$PYTHON" -m vllm_blend.ray.command "$@"
