from libflash.conformance.error_bounds import *
