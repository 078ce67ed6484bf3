"""The processes of an engine that computes in several (tensor_parallel_size): how they start and
end, what rank 0 tells them, and how they gather what each has computed.

Start with leading_rank.py (rank 0) and following_rank.py (the others); processes.py and group.py
are under them. `engine` imports this folder when there is more than one rank, `serving` for an
engine in a process of its own; nothing here imports them.
"""
