"""The platform: devices and their streams, cache folders, forked processes, the garbage collector.

Start with device.py. Imports only errors and config of this package.
"""
