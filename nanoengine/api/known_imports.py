"""Names that scripts import from other engines, and what each of them is here."""

from __future__ import annotations

from nanoengine.text.known_names import read_table

IMPORT = "import"
TABLE = """\
changed: keywords, LLM(model, max_model_len=8192); LLM.from_engine_args(args) and
AsyncLLM.from_engine_args(args) take vLLM's, in a dict
  vLLM: EngineArgs AsyncEngineArgs
changed: LLM, whose stream() gives tokens as they come, or AsyncLLM, which takes requests at any
time
  vLLM: LLMEngine AsyncLLMEngine
changed: a text, a list of token ids, or {"prompt_token_ids": [...]}
  vLLM: TextPrompt TokensPrompt PromptType
changed: StructuredOutputsParams, which takes the same fields
  vLLM: GuidedDecodingParams
changed: LLM.stream() and AsyncLLM.stream(), which give what is new
  vLLM: RequestOutputKind
changed: LLM(model, lora=FOLDER), one adapter for all requests
  vLLM: LoRARequest
missing: a model writes text here; it computes no embeddings, scores or classes
  vLLM: PoolingParams PoolingOutput EmbeddingRequestOutput
"""
IMPORTS = {row.name: row for row in read_table(IMPORT, TABLE)}
