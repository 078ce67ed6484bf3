"""The platform: devices and their streams, cache folders, detection of forked processes.

Start with device.py. Imports only errors and config of this package.
"""
