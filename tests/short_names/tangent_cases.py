from libflash.conformance.tangent_cases import *
