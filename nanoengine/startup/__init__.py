"""Once, before the first step: how the memory is divided, and what a decode step will cost.

Start with parts.py, then memory_plan.py. Imports every folder but engine and bench.
"""
