"""GGUF files: is it whole (structure), what does it say (metadata), and as a Hugging Face folder
(settings, tokenizer, convert).
"""
