"""Fast code: C for a CPU, Triton for a GPU, and the replay of decode steps.

Start with cpu_kernels.c, whose head states the law that holds a row's bits. Imports models (for
LayerOps) and devices.
"""
