"""Which keys meet which queries: one backend each for C, Triton, flash kernels and plain PyTorch.

Start with select.py. Imports kernels and devices; meets the memory in context.py alone.
"""
