"""Benchmarks for users: `python -m nanoengine.bench offline`, and the needle test (ruler.py).

Imports the public API, loading and text; nothing imports it.
"""
