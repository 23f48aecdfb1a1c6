// The two ways to compute a prefill tile; both write their rows of a.out.
#ifndef VLLM_BLEND_PREFILL_H
#define VLLM_BLEND_PREFILL_H

#include "tile.h"

namespace VB_NAMESPACE {

template <typename T>
size_t prefill_scratch_bytes();
template <typename T>
void prefill_tile(const Paged& a, const Tile& tile, void* scratch);

}  // namespace VB_NAMESPACE
#endif
