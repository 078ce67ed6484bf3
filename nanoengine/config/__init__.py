"""Frozen records of what is given: settings of the engine, which check themselves (engine.py), the
shape of a model (model.py), and what attention backends support (attention.py).

May import errors and text/. Imports no torch and reads no files; loading/model_config.py reads a
checkpoint's ModelConfig. Start at engine.py.
"""
