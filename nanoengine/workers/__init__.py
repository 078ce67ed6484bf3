"""The worker processes of an engine that runs in several: how they start, what they are told, how
they are watched and ended.

Start with processes.py, then worker_process.py. `engine` imports this folder when an engine has
more than one rank, `serving` for an engine in a process of its own; nothing here imports them.
"""
