"""Triton kernels and their launchers, one file an op. `fastadv/kernels.py` is the table that finds them."""
