"""Arithmetic that can be held: rounding, sums as matrix units make them, tolerances derived from both, and probes that find them from the outside."""
