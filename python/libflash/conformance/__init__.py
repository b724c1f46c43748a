"""What is tested of attention, and how: the float64 oracle, the cases, the tolerance rule. Needs NumPy and ml_dtypes.

The oracle: `reference` (attention), `reference_decode` (KV cache, merge), `reference_tangent` (forward mode and second
derivatives), with `visibility` and `dropout_mask`; it shares no code with the library. The problems: `cases` and `decode_cases`
list them, `case` builds one, with the values of `fills` and `structured`. The rule: `tolerance`, with `error_bounds`,
`tangent_bounds`, `rounding` and `eager`.
"""
