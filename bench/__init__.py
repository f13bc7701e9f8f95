"""Measures this machine: ours beside the raw limit, as ratios of one run."""
