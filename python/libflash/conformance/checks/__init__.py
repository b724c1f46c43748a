"""Checks besides the cases: each runs a target on inputs of its own and raises AssertionError for what does not hold.

`run(q, k, v, dout=None, **options)` returns o, and lse and gradients if the target computes them. It raises NotOffered where
the target lacks something.
"""
