"""Imported before all other modules of the adapter: refuses a JAX that is too old for them."""

from __future__ import annotations

import jax

from ._versions import require

require("JAX", jax.__version__, "libflash.jax")
