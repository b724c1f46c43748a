from libflash.conformance.cases import *
