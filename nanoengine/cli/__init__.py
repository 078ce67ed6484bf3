"""The command `nanoengine`: thin over the library, which never imports it.

Modules import torch, and what imports it, inside the functions that need it: `--help` and a wrong
flag answer at once.
"""
