#!/usr/bin/env bash
# Builds the CUDA kernels for every supported GPU into one shared library and prints registers and spills of every kernel.
# Needs nvcc and Python only: no GPU, no torch. Unchanged files are not compiled again. The flags are in
# vllm_blend/ops/cuda_build.py.
#   BUILD_DIR  folder of the objects and the library (build/cuda)
#   NVCC       the compiler (CUDACXX, nvcc of CUDA_HOME, else nvcc)
#   JOBS       files compiled at once (2)
#   DEFINES    extra compiler flags
#   PYTHON     the interpreter (python3)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/usage.sh"
no_arguments "${BASH_SOURCE[0]}" "$@"
cd "$(dirname "$0")/.."
BUILD_DIR=${BUILD_DIR:-build/cuda}
"${PYTHON:-python3}" -I vllm_blend/ops/cuda_build.py --out "$BUILD_DIR" --jobs "${JOBS:-2}" ${NVCC:+--nvcc "$NVCC"} \
  "--defines=${DEFINES:-}"

grep -hE "warning|C75" "$BUILD_DIR"/*.log | sort | uniq -c || true
awk '/Compiling entry function/ { match($0, /_ZN[^'"'"']*/); name = substr($0, RSTART, RLENGTH); arch = $NF; gsub(/'"'"'/, "", arch) }
     /bytes stack frame/ { spills = $5 " B stored, " $9 " B loaded" }
     /Used [0-9]+ registers/ { match($0, /Used [0-9]+ registers/); printf "%-8s %-110s %s, spills %s\n", arch, name, substr($0, RSTART + 5, RLENGTH - 5), spills }' \
  "$BUILD_DIR"/*.log | (command -v c++filt >/dev/null && c++filt || cat) | sort -u
ls -l "$BUILD_DIR/libvllm_blend_cuda.so"
