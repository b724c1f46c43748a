from libflash.conformance.fills import *
