#include "decode_instances.h"

using namespace libflash::cuda;

template int libflash::cuda::launch_decode<DecodeKernel>(const DecodePlan&, const DecodeParams&, void*);
template KernelResources libflash::cuda::resources_of_decode<DecodeKernel>(int, int);
