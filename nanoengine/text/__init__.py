"""Converts text to token ids and back, and renders chat templates in their own process.

Start with tokenizer.py. Imports no other folder. known_names.py holds what error texts say about
names of other engines.
"""
