from libflash.conformance.reference_tangent import *
