// The grouped products of the experts built for a CPU: kernels and entry points as they are.
#define ANABRANCH_EMULATE
#include "grouped.cu"

TVM_FFI_DLL_EXPORT_TYPED_FUNC(seed, [](int n) { emulate_seed = (unsigned)n; });
