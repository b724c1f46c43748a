from libflash.conformance.decode_cases import *
