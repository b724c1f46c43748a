from libflash.conformance.convert import *
