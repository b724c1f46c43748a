from libflash.conformance.eager import *
