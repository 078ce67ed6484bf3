"""What other tools send and expect: bodies and answers of OpenAI's API and of Anthropic's. A server
will live here.

Start with openai_requests.py. Imports text/ alone; only cli/ imports it.
"""
