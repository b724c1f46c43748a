from libflash.conformance.dropout_mask import *
