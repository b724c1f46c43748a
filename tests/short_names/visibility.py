from libflash.conformance.visibility import *
