"""Checks of the files that a program is given, before its work begins."""

from __future__ import annotations

import argparse
import os
import pathlib

READ, WRITTEN = ("checkpoint",), ("save", "json", "chart")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """The files that are read can be read, and those that the program writes at its end can be written."""
    for names, fault in ((READ, unreadable), (WRITTEN, unwritable)):
        for name in names:
            path = getattr(options, name, None)
            if path and (rule := fault(path)):
                parser.error(f"--{name} is {path}; {rule}")


def unreadable(path: pathlib.Path) -> str | None:
    """The rule that the path breaks."""
    try:
        path.open("rb").close()
    except OSError as error:
        return f"it must be a file that can be read ({error.strerror})"
    return None


def unwritable(path: pathlib.Path) -> str | None:
    """The rule that the path breaks. No file is made."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"the folder {folder} must exist"
    if path.is_dir():
        return "it must be a file, not a folder"
    if not os.access(path if path.exists() else folder, os.W_OK):
        return "it must be a file that can be written"
    return None
