"""Imported before all other modules of the adapter: refuses a PyTorch that is too old for them."""

from __future__ import annotations

import torch

from ._versions import require

require("PyTorch", torch.__version__, "libflash.torch")
