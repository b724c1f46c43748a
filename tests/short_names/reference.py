from libflash.conformance.reference import *
