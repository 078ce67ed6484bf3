"""From a model's name to tensors that were checked.

Start with loader.py; GGUF files have a folder of their own. Imports models, text and devices.
"""
