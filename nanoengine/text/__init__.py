"""Between text and token ids: the tokenizer, and chat templates in a process of their own.

Start with tokenizer.py. Imports no other folder.
"""
