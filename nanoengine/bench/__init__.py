"""What users measure with: `python -m nanoengine.bench offline`, and the needle test (ruler.py).

Imports everything, and nothing imports it.
"""
