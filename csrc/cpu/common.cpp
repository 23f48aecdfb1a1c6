// What exists once: which instruction sets can run here, and scratch memory.
#include <stdlib.h>

#include "../vllm_blend_cpu.h"
#include "parallel.h"

#if defined(__x86_64__) && defined(VB_HAVE_AVX512BF16)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { free(data); }
};

thread_local Buffer buffers[VB_SCRATCH_SLOTS];

#if defined(__x86_64__) && defined(VB_HAVE_AVX512)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

#if defined(__x86_64__) && defined(VB_HAVE_AVX512BF16)
bool multiplies_bf16() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5)) && has_avx512();
}

#if defined(VB_HAVE_AMX)
bool amx_usable() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tile = d & (1u << 24), tile_bf16 = d & (1u << 22);
  if (!tile || !tile_bf16 || !multiplies_bf16()) return false;
  // Linux hands out the tile registers on request (arch_prctl ARCH_REQ_XCOMP_PERM of XTILEDATA), to the whole process.
  const long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif
#endif

const char* find_isas() {
  static char names[64];
  char* end = names;
  auto add = [&end](const char* name) {
    if (end != names) *end++ = ' ';
    while (*name) *end++ = *name++;
    *end = 0;
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(VB_HAVE_AMX)
  if (amx_usable()) add("amx");
#endif
#if defined(VB_HAVE_AVX512BF16)
  if (multiplies_bf16()) add("avx512bf16");
#endif
#if defined(VB_HAVE_AVX512)
  if (has_avx512()) add("avx512");
#endif
#if defined(VB_HAVE_AVX2)
  // Every CPU with AVX2 and FMA converts half precision (F16C) too.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) add("avx2");
#endif
#endif
  add("generic");
  return names;
}

}  // namespace

const char* vb_cpu_isas(void) {
  static const char* names = find_isas();
  return names;
}

int64_t vb_cpu_abi_version(void) { return VB_ABI_VERSION; }

void* vb_scratch(int slot, size_t bytes) {
  Buffer& buffer = buffers[slot];
  if (!buffer.data || buffer.size < bytes) {
    free(buffer.data);
    const size_t size = (bytes + bytes / 2 + 4096) / 4096 * 4096;  // never 0: a null pointer says that there is no memory
    buffer.data = aligned_alloc(64, size);
    buffer.size = buffer.data ? size : 0;
  }
  return buffer.data;
}
