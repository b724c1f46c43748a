"""The build backend (PEP 517): scikit-build-core, plus the CUDA compiler from the package index if it is needed.

LIBFLASH_CUDA in the environment or -Ccmake.define.LIBFLASH_CUDA=... :
    auto    (default) what this machine can use: its nvcc; without one but with an NVIDIA driver the compiler from the package
            index; else the CPU library
    on      the CUDA part, or the build stops      off     the CPU library (1, true, yes and 0, false, no mean the same)
    system  as on, with the machine's nvcc only    pypi    as on, with the compiler from the package index only
"""

from __future__ import annotations

import sys

import announce
import cuda_choice
from scikit_build_core import build as _backend
from scikit_build_core.build import (  # noqa: F401  (hooks that stay as they are)
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

Settings = dict[str, str | list[str]] | None


def _choice(config_settings: Settings) -> cuda_choice.Choice:
    try:
        choice = cuda_choice.choose_here(config_settings)
    except cuda_choice.ChoiceError as error:
        raise SystemExit(f"libflash: {error}") from None
    print(f"libflash: LIBFLASH_CUDA={choice.mode}: {choice.line}", file=sys.stderr)
    return choice


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*_backend.get_requires_for_build_wheel(config_settings), *_choice(config_settings).requires]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*_backend.get_requires_for_build_editable(config_settings), *_choice(config_settings).requires]


def _about_to_build(config_settings: Settings) -> Settings:
    """Announces the build; returns the settings with the mode that was chosen."""
    choice = _choice(config_settings)
    announce.announce(announce.line(choice.cuda, announce.processors()))
    return {**(config_settings or {}), "cmake.define.LIBFLASH_CUDA": choice.mode}


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    name: str = _backend.build_wheel(wheel_directory, _about_to_build(config_settings), metadata_directory)
    return name


def build_editable(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    name: str = _backend.build_editable(wheel_directory, _about_to_build(config_settings), metadata_directory)
    return name
