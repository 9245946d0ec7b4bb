"""Arms of an experiment side by side over their seeds: `fp8rl compare`. See docs/compare.md."""
