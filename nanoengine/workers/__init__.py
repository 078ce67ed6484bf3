"""The worker processes of an engine that runs in several: how they start, what they are told, how
they are watched and ended.

Start with processes.py, then worker_process.py. Only `engine` imports this folder, and only when an
engine has more than one rank; nothing here imports `engine`.
"""
