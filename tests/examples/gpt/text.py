"""The text: the sources of Python's standard library. A token is a byte."""

from __future__ import annotations

import pathlib
import sysconfig

import torch

VOCABULARY = 256
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "encodings"}  # other packages, or tables of numbers


def load(most_bytes: int = 1 << 24) -> torch.Tensor:
    """(bytes,) uint8: the files one after the other, in the order of their names."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
    text = bytearray()
    for path in files:
        text += path.read_bytes()
        if len(text) >= most_bytes:
            break
    return torch.frombuffer(text[:most_bytes], dtype=torch.uint8)


def pieces(text: torch.Tensor, number: int, length: int, seed: int) -> torch.Tensor:
    """(number, length) int64: from positions that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (number,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts.tolist()]).long()


def shown(tokens: torch.Tensor) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")
