"""The options in the groups that the places need."""

from __future__ import annotations

from typing import Any


class Groups:
    """The options as the places need them, each in the order of the list."""

    def __init__(self, options: Any) -> None:
        self.list = options
        self.all = options.OPTIONS

    def of(self, operation: str) -> list[Any]:
        return list(self.list.options_of(operation))

    def in_struct(self, operation: str) -> list[Any]:
        """Of attention and attention_backward alike, or of decode: what the options struct is filled with."""
        options = [option for option in self.of(operation) if option.fields or option.flag]
        if operation == "decode":
            return options
        return [option for option in options if self.is_common(option) and option.adapters != ()]

    def of_shards(self, operation: str = "") -> list[Any]:
        """Those of a part of a problem: of both directions, or of one operation."""
        options = [option for option in self.all if option.adapters == ()]
        return [option for option in options if operation in option.operations or (not operation and self.is_common(option))]

    def is_common(self, option: Any) -> bool:
        return set(self.list.ATTENTION) <= set(option.operations)

    def of_adapter(self, function: str, adapter: str) -> list[Any]:
        return [option for option in self.all if function in option.functions and getattr(option, adapter)]

    def of_scores(self) -> list[Any]:
        """What attention, its gradients and decode have alike, and other operations do not have."""
        return [option for option in self.all if option.operations == self.list.SCORES]

    def numbers_of_scores(self) -> list[Any]:
        """softmax_scale, softcap, ...: what all operations with scores, their parts and the reference have."""
        return [option for option in self.all if option.name in self.list.SCORE_NUMBERS]

    def attributes(self) -> dict[str, tuple[str, set[str]]]:
        """Of the JAX adapter: for each number and text the kind in C and the operations."""
        given_by_context = ("head_begin", "heads_total")
        found: dict[str, tuple[str, set[str]]] = {}
        kinds = {"double": "REAL", "const char *": "TEXT"}
        for option in self.all:
            if not option.kind.array and option.kind is not self.list.OUTPUT and (option.jax or option.name in given_by_context):
                for field in option.fields:
                    if field != "rng_state":
                        found.setdefault(field, (kinds.get(option.kind.c, "INTEGER"), set()))[1].update(option.operations)
        return found


def owners(operations: set[str]) -> str:
    """The option structs that have a field, as attributes.c names them."""
    if "cache_write" in operations:
        return "ALL"
    if "decode" not in operations:
        return "ATTENTION"
    return "BOTH" if "attention" in operations else "DECODE"
