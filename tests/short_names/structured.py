from libflash.conformance.structured import *
