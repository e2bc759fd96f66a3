"""Triton kernels and their launchers, one file an op. None yet: the `triton` backend is not part of this version."""
