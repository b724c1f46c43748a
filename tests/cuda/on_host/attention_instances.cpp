// The code of the kernels of attention_kernels.h.
#include "attention_kernels.h"

template int libflash::cuda::launch_forward<ForwardKernel>(const ForwardPlan&, const ForwardParams&, void*);
template int libflash::cuda::launch_backward<BackwardKernel>(const BackwardPlan&, const BackwardParams&, void*);
