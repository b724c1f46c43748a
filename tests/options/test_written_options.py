"""What python/write_options writes agrees with the list of options and the header, and CONTRIBUTING.md names every place."""

from __future__ import annotations

import re

import option_places
import pytest
from libflash._option_list import OPTIONS, Option
from stated_options import ROOT

from libflash import _option_list

PARAGRAPH = re.search(r"\*\*An option\.\*\*(.*?)\n\n\*\*", (ROOT / ".github/CONTRIBUTING.md").read_text(), re.S)
BY_HAND, WRITTEN = (set(re.findall(r"`([\w/.]+\.\w+)`", part)) for part in PARAGRAPH[1].split("`python python/write_options`"))
# Files that name softcap although a new option needs no line there.
MEANING = {  # what a softcap is in particular: its derivatives, its limits, rules about it
    *(f"libflash/cpu/engine/{name}.h" for name in ("attend_tangent", "backward", "backward_tangent", "dbias", "gradient")),
    "libflash/cpu/engine/gradient_tangent.h", "libflash/cpu/scalar_gradient.h", "libflash/cpu/scalar_tangent.h",
    *(f"python/libflash/conformance/{name}.py" for name in ("eager", "error_bounds", "reference_tangent", "tangent_bounds")),
    "python/libflash/_flash_attn_probabilities.py", "python/libflash/_tangents.pxi",
    *(f"python/libflash/conformance/checks/{name}.py" for name in ("bad_input", "edges")),
    "python/libflash/conformance/cache_cases.py",
}  # fmt: skip
OTHER_INTERFACES = {  # what flash-attn and Hugging Face call with
    "python/libflash/flash_attn.py", "python/libflash/_flash_attn_calls.py",
    "python/libflash/conformance/targets/flash_attn.py", "python/libflash/_torch_hf.py", "python/libflash/_torch_hf_paged.py",
}  # fmt: skip


class More:
    """The list of options with one more."""

    def __init__(self, option: Option) -> None:
        at = next(i for i, known in enumerate(OPTIONS) if known.name == "softcap") + 1
        self.OPTIONS = (*OPTIONS[:at], option, *OPTIONS[at:])
        self.SCORE_NUMBERS = (*_option_list.SCORE_NUMBERS, option.name)

    def options_of(self, operation: str) -> list[Option]:
        return [option for option in self.OPTIONS if operation in option.operations]

    def __getattr__(self, name: str) -> object:
        return getattr(_option_list, name)


def test_nothing_is_to_be_written() -> None:
    assert [str(path.relative_to(ROOT)) for path in option_places.changed(_option_list)] == []


@pytest.mark.parametrize("option", [Option("score_scale", _option_list.NUMBER, 1.0, _option_list.SCORES, rank=9)])
def test_a_new_option_is_written_to_the_places_that_contributing_names(option: Option) -> None:
    found = {str(path.relative_to(ROOT)): text for path, text in option_places.changed(More(option)).items()}
    assert all("score_scale" in text for text in found.values())
    assert set(found) | {"python/libflash/_capi.pxd"} == WRITTEN  # that one has what the header has
    assert re.search(r"softcap=0.0,\s+score_scale=1.0,", found["python/libflash/_core.pyx"])
    assert 'made.score_scale = number(score_scale, "score_scale")\n' in found["python/libflash/_options.pxi"]


def test_contributing_names_files_that_exist() -> None:
    for name in BY_HAND | WRITTEN:
        assert (ROOT / name).is_file(), name


def test_contributing_names_every_file_that_names_an_option() -> None:
    """softcap stands for any number that scores depend on. This is not about the CUDA kernels that support it."""
    folders = [
        *(f"libflash/{name}" for name in ("capi", "cpu", "plan", "problem")),
        "include",
        "python/jax_ffi",
        "python/libflash",
    ]
    suffixes = {".c", ".cpp", ".h", ".py", ".pyx", ".pxd", ".pxi", ".pyi"}
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    naming = {str(path.relative_to(ROOT)) for path in paths if "softcap" in path.read_text()}
    assert naming - BY_HAND - WRITTEN == MEANING | OTHER_INTERFACES
