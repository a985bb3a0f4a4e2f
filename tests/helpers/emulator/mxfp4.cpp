// The MXFP4 products of few pairs built for a CPU: kernels and entry points as they are, on two multiprocessors.
#define ANABRANCH_EMULATE
inline int multiprocessors(int) { return 2; }

#include "mxfp4.cu"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(seed, [](int n) { emulate_seed = (unsigned)n; });
