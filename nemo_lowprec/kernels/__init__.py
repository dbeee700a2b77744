"""Triton kernels, the tables that they read, and the loader that decides whether they run."""
