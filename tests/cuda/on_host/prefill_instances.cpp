#include "prefill_instances.h"

using namespace libflash::cuda;

template int libflash::cuda::launch_prefill<PrefillKernel>(const PrefillPlan&, const PrefillParams&, void*);
template KernelResources libflash::cuda::resources_of_prefill<PrefillKernel>(int, int);
