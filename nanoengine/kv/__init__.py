"""The memory: KV blocks on the device and on the host, and the copies between them.

Start with kv_cache.py, then offload.py. Knows no model and no kernel; imports devices.
"""
