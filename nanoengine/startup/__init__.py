"""Once, before the first step: how the memory is divided, and what a decode step will cost.

Start with memory_plan.py. Imports kv and devices.
"""
