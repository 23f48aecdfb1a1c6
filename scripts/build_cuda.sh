#!/usr/bin/env bash
# Builds the CUDA kernels into one shared library and prints registers and spills of every kernel.
# Needs nvcc only: no GPU, no torch. Unchanged files are not compiled again.
#   OUT     folder of the objects and the library (build/cuda)
#   NVCC    the compiler (nvcc)
#   JOBS    files compiled at once (2)
#   DEFINES extra compiler flags
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/cuda}
NVCC=${NVCC:-nvcc}
JOBS=${JOBS:-2}
DEFINES=${DEFINES:-}
mkdir -p "$OUT"

common="-O3 -std=c++17 -Xcompiler -fPIC,-fvisibility=hidden,-Wall -Xptxas -v --expt-relaxed-constexpr $DEFINES"
portable="-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=[sm_90,compute_90]"
hopper="-gencode=arch=compute_90a,code=sm_90a"
newest_header=$(ls -t csrc/cuda/*.cuh csrc/cuda/*.h "$0" | head -1)

compile() {
  local source=$1 object=$OUT/$(basename "$1" .cu).o arch=$portable
  [[ $source == *wgmma* ]] && arch=$hopper
  if [[ ! -f $object || $source -nt $object || $newest_header -nt $object ]]; then
    "$NVCC" $common $arch -c "$source" -o "$object" 2>"$object.log" || { cat "$object.log" >&2; rm -f "$object"; return 1; }
  fi
}
export -f compile
export OUT NVCC common portable hopper newest_header
printf '%s\n' csrc/cuda/*.cu | xargs -P "$JOBS" -I{} bash -ec 'compile {}'

"$NVCC" -shared -cudart static -o "$OUT/libvllm_blend_cuda.so" "$OUT"/*.o
grep -hE "warning|C75" "$OUT"/*.log | sort | uniq -c || true
awk '/Compiling entry function/ { match($0, /_ZN[^'"'"']*/); name = substr($0, RSTART, RLENGTH); arch = $NF; gsub(/'"'"'/, "", arch) }
     /bytes stack frame/ { spills = $5 " B stored, " $9 " B loaded" }
     /Used [0-9]+ registers/ { match($0, /Used [0-9]+ registers/); printf "%-8s %-110s %s, spills %s\n", arch, name, substr($0, RSTART + 5, RLENGTH - 5), spills }' \
  "$OUT"/*.log | (command -v c++filt >/dev/null && c++filt || cat) | sort -u
ls -l "$OUT/libvllm_blend_cuda.so"
