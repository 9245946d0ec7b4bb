"""Constants of the FP8 formats. Imports without torch."""

E4M3_MAX = 448.0
BLOCK = 128
