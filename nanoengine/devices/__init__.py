"""The platform: devices and their streams, folders for caches, the process that we live in.

Start with device.py. Imports nothing of ours but errors and config.
"""
