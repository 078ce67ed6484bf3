"""Attention backends: one each for C, Triton, flash kernels and plain PyTorch.

Start with select.py. Imports kernels and devices; reads KV only through context.py.
"""
