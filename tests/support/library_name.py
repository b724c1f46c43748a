"""The file name of the shared library, which is its SONAME, and the version of its symbols."""

from __future__ import annotations


def soname(version: str) -> str:
    """While the major version is 0 a minor version may change the interface, so the name has both."""
    major, minor, _ = version.split(".")
    return f"libflash.so.0.{minor}" if major == "0" else f"libflash.so.{major}"


def symbol_version(version: str) -> str:
    """The same numbers as in the SONAME."""
    return "LIBFLASH_" + soname(version).removeprefix("libflash.so.")
