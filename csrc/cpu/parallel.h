// How kernels share work between threads, and where they get scratch memory.
#ifndef VLLM_BLEND_PARALLEL_H
#define VLLM_BLEND_PARALLEL_H

#include <stddef.h>
#include <stdint.h>

// Scratch of the calling thread: 64-byte aligned, kept between calls, valid until the next call with the same slot.
// Null when there is no memory. Defined once for all instruction sets, in common.cpp.
enum vb_scratch_slot { VB_SCRATCH_SHARED = 0, VB_SCRATCH_PRIVATE = 1, VB_SCRATCH_SLOTS = 2 };
void* vb_scratch(int slot, size_t bytes);

#define VB_PRAGMA_(text) _Pragma(#text)
#define VB_PRAGMA(text) VB_PRAGMA_(text)
// Starting a team costs a few microseconds: below this many elements one thread is faster.
#define VB_SERIAL_ELEMENTS 16384
#define VB_PARALLEL_FOR(elements) \
  VB_PRAGMA(omp parallel for schedule(static) num_threads(threads) if ((threads) > 1 && (elements) > VB_SERIAL_ELEMENTS))

#endif
