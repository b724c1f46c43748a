"""The programs of this folder are modules to its tests, as they are to each other."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
