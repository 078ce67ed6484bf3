"""Fast code: C for a CPU, Triton for a GPU, and the replay of decode steps.

Start with cpu_attention.h: its head states the rule that fixes the bits of a row. Imports models
(for LayerOps) and devices.
"""
