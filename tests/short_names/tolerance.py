from libflash.conformance.tolerance import *
