#include "prefix_instances.h"

using namespace libflash::cuda;

template int libflash::cuda::launch_decode_prefix<PrefixKernelOfSm90>(const DecodePlan&, const DecodeParams&, void*);
template KernelResources libflash::cuda::resources_of_decode_prefix<PrefixKernelOfSm90>(int, int);
