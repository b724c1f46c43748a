from libflash.conformance.tangent_bounds import *
