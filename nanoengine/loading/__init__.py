"""Finds a model by its name and loads its checked tensors.

Start with loader.py; gguf/ reads GGUF files. Imports models, text and devices.
"""
