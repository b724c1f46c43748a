from libflash.conformance.reference_statistics import *
