from libflash.conformance.reference_decode import *
