"""Every step: who runs next (scheduler), the forward pass (model_runner), the tokens (sampler).

Start with llm_engine.py, then scheduler.py and model_runner.py. Imports every folder but bench and
attention.
"""
