"""The oldest versions of the frameworks that the adapters work with.

PyTorch: torch.nn.attention has restore_flash_attention_impl since 2.11. JAX: with 0.7.0 and older, every call fails in a process
with several devices. transformers: continuous batching takes the names of registered attention functions since 5.19; without
paged=True, enable(model) works with older versions.
"""

from __future__ import annotations

NEEDED = {"PyTorch": "2.11", "JAX": "0.7.2", "transformers": "5.19"}


def numbers_of(version: str) -> tuple[int, ...]:
    """The numbers at the begin of a version: (2, 11, 0) of "2.11.0a0+git12ab"."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def too_old(package: str, found: str, user: str) -> str | None:
    """The error text, if the version of the package that was found is older than what `user` needs."""
    if numbers_of(found) >= numbers_of(NEEDED[package]):
        return None
    return f"{user} needs {package} {NEEDED[package]} or newer; the version found is {found}"


def require(package: str, found: str, user: str) -> None:
    text = too_old(package, found, user)
    if text is not None:
        raise ImportError(text)
