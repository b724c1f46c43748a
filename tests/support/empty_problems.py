"""Problems with a size of 0: (batch, queries, query heads, keys, key heads)."""

NONE = {
    "sequences": (0, 37, 4, 50, 2),
    "query heads": (2, 37, 0, 50, 2),
    "heads": (2, 37, 0, 50, 0),
    "queries": (2, 0, 4, 50, 2),
    "keys": (2, 37, 4, 0, 2),
}
