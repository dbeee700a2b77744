"""Advice on levels: what fits, how long a step takes, and which layers FP8 serves badly."""
