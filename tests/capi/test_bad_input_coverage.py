"""Every call of a check in the library's sources has a bad case (bad_cases_*.py).

The sources are read as text. A call site is a refusal with its rule (`invalid("softcap", "must be ...")`) or a shared check with
the name of what it checks (`check_shape(view, "lse", ...)`). A bad case covers a site if argument and rule agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from abi import ROOT
from test_bad_input import BAD_CASES

FOLDERS = ("problem", "plan", "capi", "cuda")  # of cuda only the host files at the top
STATUSES = {"FLASH_STATUS_INVALID", "FLASH_STATUS_WORKSPACE", "FLASH_STATUS_NO_DEVICE"}

# Refusals that need another machine.
UNREACHABLE = {
    "schedule: must have at least the bytes that flash_attention_decode_schedule_size returns": "tests/plan has it",
    "schedule: data must be aligned to 16 bytes": "tests/plan has it",
    "device_id: must be below the number of devices": "needs a GPU; tested on machines that have one",
    "device_type: the tensors are on a GPU, but no GPU is usable": "tested on machines without a GPU",
}

# The common part of the text of each shared check.
SHARED = {
    "check_ndim": "must have",
    "check_shape": "shape must be",
    "check_gradient": "shape must be",
    "check_partial_dtype": "dtype must be",
    "check_dtype": "dtype must be",
    "check_float": "dtype must be float16",
    "check_float32_or": "dtype must be float32 or that of q",
    "check_device": "must be on the device",
    "check_contiguous": "must be contiguous",
    "check_like_out": "shape must be",
    "check_like_lse": "shape must be",
    "read_int32_vector": "",
    "build_head_vector": "shape must be",
    "build_score_tensor": "each size must be 1",
    "check_score_covers": "must cover",
    "check_blocks_cover": "must cover",
    "check_max_seqlen": "must be positive",
    "read_tile": "must be 0",
    "required": "",
    "optional": "",
}
DEFINITION = ("void", "int", "TensorView", "int32_t*", "HeadTensor", "ScoreTensor", "::")  # what precedes a call site
REFUSALS = ("invalid", "unknown_version", "refuse")


@dataclass(frozen=True)
class Site:
    file: str
    line: int
    check: str
    argument: str  # "" if it is a variable
    rule: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.check} {self.argument or '(any)'}: {self.rule}"


def arguments_of(text: str, start: int) -> list[str]:
    """The arguments of a call whose opening parenthesis is just before `start`."""
    parts, depth, quoted, begin = [], 0, False, start
    for at in range(start, len(text)):
        char = text[at]
        if char == '"' and text[at - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif char in "([{":
            depth += 1
        elif char in ")]}" and depth > 0:
            depth -= 1
        elif char in ",)" and depth == 0:
            parts.append(text[begin:at].strip())
            begin = at + 1
            if char == ")":
                return parts
    raise AssertionError("an open call")


def literal(text: str) -> str:
    """The characters of a string literal, or of the first one in Argument("outs", i); "" if there is none."""
    found = re.fullmatch(r'(?:Argument\()?((?:"(?:[^"\\]|\\.)*"\s*)+)(?:,.*\))?', text, re.S)
    return "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', found[1])).replace('\\"', '"') if found else ""


def sites_of(path: Path) -> Iterator[Site]:
    text = re.sub(r"//[^\n]*", "", path.read_text())
    # Of a rule composed in a variable the first words count.
    built = re.compile(r'const std::string rule = text_of\("([^"]*)"')
    for found in re.finditer(r"\b(\w+)\(", text):
        check = found[1]
        line = text.count("\n", 0, found.start()) + 1
        before = text[: found.start()].rstrip()
        if check not in (*REFUSALS, *SHARED) or before.endswith(DEFINITION):
            continue
        values = arguments_of(text, found.end())
        if check == "refuse":
            if values[0] not in STATUSES:
                continue
            values = values[1:]
        if check in REFUSALS:
            rule = literal(values[1])
            if values[1] == "rule.c_str()":
                rule = built.findall(text[: found.start()])[-1]
            if values[1] == "kBlockRule":
                rule = "shape must be (batch or 1, heads_q or 1"
            yield Site(path.name, line, check, literal(values[0]), rule)
        else:
            first = 0 if check in {"check_max_seqlen", "read_tile"} else 1
            names = [name for value in values[first : first + 2] if (name := literal(value)) and "(" not in name]
            if names:
                yield Site(path.name, line, check, names[0], SHARED[check])


SITES = [site for folder in FOLDERS for path in sorted((ROOT / "libflash" / folder).glob("*.cpp")) for site in sites_of(path)]


def covered(site: Site) -> bool:
    def same_argument(argument: str) -> bool:
        return not site.argument or argument == site.argument or argument.startswith(site.argument + "[")

    def same_rule(rule: str) -> bool:
        return rule in site.rule or site.rule in rule

    return any(same_argument(bad.argument) and same_rule(bad.rule) for bad in BAD_CASES)


@pytest.mark.parametrize("site", [pytest.param(site, id=str(site)) for site in SITES])
def test_site_has_a_row(site: Site) -> None:
    if f"{site.argument}: {site.rule}" in UNREACHABLE:
        return
    assert site.rule or site.check in {"required", "optional", "read_int32_vector"}, "the rule of this refusal is not a literal"
    assert covered(site), "no case in bad_cases_*.py causes this refusal"


def test_the_reader_finds_sites() -> None:
    """The search finds call sites and cases; without any the tests above would always pass."""
    assert len(SITES) > 150
    assert {site.check for site in SITES} >= {"invalid", "unknown_version", "refuse", "check_shape", "check_device", "required"}
    assert all(any(f"{s.argument}: {s.rule}" == text for s in SITES) for text in UNREACHABLE), "an exception that nothing needs"


def test_an_unknown_refusal_is_not_covered() -> None:
    assert not covered(Site("x.cpp", 1, "invalid", "softcap", "must be prime"))
    assert not covered(Site("x.cpp", 1, "check_shape", "no_such_tensor", "shape must be"))
