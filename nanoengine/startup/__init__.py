"""Before the first step: builds the engine's parts, plans memory, measures a decode step.

Start with parts.py, then memory_plan.py. Imports every folder but engine and bench.
"""
