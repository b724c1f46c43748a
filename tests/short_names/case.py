from libflash.conformance.case import *
