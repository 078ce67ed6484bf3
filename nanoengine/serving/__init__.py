"""What other tools send and expect: bodies and answers of OpenAI's API, and the server for them.

openai_*.py knows no HTTP, so that `nanoengine batch` shares it; start with openai_requests.py. In
the server start with app.py; asgi.py is for other servers. Only cli/ imports this folder.
"""
