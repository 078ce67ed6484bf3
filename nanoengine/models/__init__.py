"""The maths: one decoder for all architectures, its layers, rotary positions, quantised weights.

Start with decoder.py, then architectures.py. Imports no other folder of the package.
"""
