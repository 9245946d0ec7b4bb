"""Timings. They live here and never in pass/fail tests; compare ratios, not seconds."""
