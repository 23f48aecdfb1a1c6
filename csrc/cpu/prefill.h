// The two ways to compute a prefill tile; both write their rows of a.out.
#ifndef VLLM_BLEND_PREFILL_H
#define VLLM_BLEND_PREFILL_H

#include "rows.h"

namespace VB_NAMESPACE {

size_t prefill_scratch_bytes();
template <typename T, typename C>
void prefill_tile(const Paged& a, const Tile& tile, void* scratch);

size_t prefill_amx_scratch_bytes();
template <typename C>
void prefill_tile_amx(const Paged& a, const Tile& tile, void* scratch);  // bf16 and a cache of C, tiles_begin() called

}  // namespace VB_NAMESPACE
#endif
