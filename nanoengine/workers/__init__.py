"""The ranks of tensor parallelism: how they gather what each has computed.

Start with group.py. Imports kernels and the base files of this package.
"""
