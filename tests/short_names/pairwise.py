from libflash.conformance.pairwise import *
