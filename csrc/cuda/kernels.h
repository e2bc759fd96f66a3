// The CUDA kernels, as bindings_cuda.cpp calls them. Each op has its own file beside this one. Pointers are to contiguous
// memory of the launcher's device; sizes come from the caller, who checked them. Nothing here waits for a kernel, so a value
// without a meaning leaves NaN where it would have counted.
#pragma once

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/rows.h"

namespace fastadv::cuda {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kUInt8 = 3, kInt32 = 4, kInt64 = 5 };  // as in cpu/token_view.h

// ---- segments.cu: values of a segment table [offsets[rows]] at tokens
template <class T>  // float or double
void segment_tokens(const Launcher& launcher, const Rows& rows, const T* table, const int64_t* offsets, DType ids,
                    const void* turn_ids, const uint8_t* mask, T* tokens);

// ---- turn_ids.cu, token_counts.cu, moments.cu, group_advantages.cu, turn_advantages.cu

// ---- sequence_log_ratios.cu, policy_loss.cu

// ---- token_log_probs.cu, logits_gradient.cu

}  // namespace fastadv::cuda
