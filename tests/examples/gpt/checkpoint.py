"""A trained model in a file."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
import sys

import torch

from .model import GPT, Shape

# What torch.load and the lines after it raise for other files.
UNLIKE = (AttributeError, EOFError, IndexError, KeyError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError)


def save(model: GPT, path: pathlib.Path) -> None:
    torch.save({"shape": dataclasses.asdict(model.shape), "weights": model.state_dict()}, path)


def load(path: pathlib.Path, device: torch.device, dtype: torch.dtype) -> GPT:
    saved = torch.load(path, map_location=device, weights_only=True)
    model = GPT(Shape(**saved["shape"])).to(device, dtype)
    model.load_state_dict(saved["weights"])
    return model


def load_or_exit(path: pathlib.Path, device: torch.device, dtype: torch.dtype) -> GPT:
    """The model of --checkpoint. A file that holds none ends the program."""
    try:
        return load(path, device, dtype)
    except torch.OutOfMemoryError:
        raise
    except UNLIKE as error:
        print(f"--checkpoint is {path}; it must be what train_gpt.py --save wrote ({type(error).__name__})", file=sys.stderr)
        sys.exit(2)
