"""What other tools send and expect: OpenAI's request bodies and answers. A server will live here.

Start with openai_requests.py. Imports text/ alone; only cli/ imports it.
"""
