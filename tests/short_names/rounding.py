from libflash.conformance.rounding import *
