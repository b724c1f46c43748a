"""A trained model in a file."""

from __future__ import annotations

import dataclasses
import pathlib

import torch

from .model import GPT, Shape


def save(model: GPT, path: pathlib.Path) -> None:
    torch.save({"shape": dataclasses.asdict(model.shape), "weights": model.state_dict()}, path)


def load(path: pathlib.Path, device: torch.device, dtype: torch.dtype) -> GPT:
    saved = torch.load(path, map_location=device, weights_only=True)
    model = GPT(Shape(**saved["shape"])).to(device, dtype)
    model.load_state_dict(saved["weights"])
    return model
