// Python names for the CUDA kernels. Tensors come as addresses and sizes, the stream as an integer, so one build serves every
// torch version; the CUDA runtime is linked in. The module is fastadv._cuda; fastadv/cuda.py loads it.
#include <pybind11/pybind11.h>

#include "cuda/kernels.h"

namespace py = pybind11;
using namespace fastadv::cuda;

namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// (number of rows, number of tokens, width of a padded row, address of cu_seqlens or 0).
Rows rows_of(const py::tuple& t) {
  return {t[0].cast<int64_t>(), t[1].cast<int64_t>(), t[2].cast<int64_t>(), pointer<const int64_t>(t[3].cast<uintptr_t>())};
}

// Every function takes the device's index and the stream first.

// `wide`: table and tokens are doubles, else floats.
void py_segment_tokens(int device, uintptr_t stream, const py::tuple& rows, bool wide, uintptr_t table, uintptr_t offsets, int ids,
                       uintptr_t turn_ids, uintptr_t mask, uintptr_t tokens) {
  const Launcher launcher("segment_tokens", device, stream);
  const Rows r = rows_of(rows);
  const auto* first = pointer<const int64_t>(offsets);
  const auto* on = pointer<const uint8_t>(mask);
  if (wide) return segment_tokens(launcher, r, pointer<const double>(table), first, DType(ids), pointer<void>(turn_ids), on, pointer<double>(tokens));
  segment_tokens(launcher, r, pointer<const float>(table), first, DType(ids), pointer<void>(turn_ids), on, pointer<float>(tokens));
}

// ---- advantages

// ---- policy loss

// ---- log-probs from logits

// Kind of device whose memory the kernels read: "cuda", or "cpu" where tests compiled them for it.
const char* device_type() {
#if defined(FASTADV_CUDA_EMULATED)
  return "cpu";
#else
  return "cuda";
#endif
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "fastadv's CUDA kernels; use the ops of fastadv, which check what they pass here";
  m.def("device_type", &device_type);
  m.def("segment_tokens", &py_segment_tokens);
  // advantages
  // policy loss
  // log-probs from logits
}
