"""Methods of other engines that LLM, AsyncLLM and Tokenizer lack, and what each of them is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

from nanoengine.text.known_names import KnownName, read_table

Owner = TypeVar("Owner")

METHOD, OF_TOKENIZER = "method", "attribute of a tokenizer"
HOOK = "__getattr__"  # Python calls it for an attribute that there is not
TABLE = """\
missing: a model writes text here; it computes no embeddings, scores or classes
  vLLM: encode embed classify score reward supported_tasks  SGLang: encode rerank  llama.cpp: embed
missing: an engine does not sleep; close() frees its memory, and a new one loads the model again
  vLLM: sleep wake_up is_sleeping
  SGLang: release_memory_occupation resume_memory_occupation
missing: weights are loaded once, at start-up; make a new engine for new ones
  vLLM: init_weight_transfer_engine update_weights
  SGLang: update_weights_from_disk update_weights_from_tensor update_weights_from_distributed
missing: workers take no functions of yours; LLM.llm_engine has the parts of an engine
  vLLM: collective_rpc apply_model  SGLang: collective_rpc
missing: one LoRA adapter is of the whole engine, as in LLM(model, lora=FOLDER)
  vLLM: add_lora remove_lora list_loras pin_lora  SGLang: load_lora_adapter unload_lora_adapter
changed: llm_engine.model_config, the model's shape; the longest context is plan.max_model_len
  vLLM: model_config get_model_config vllm_config get_vllm_config max_model_len
changed: a setting of the engine, as in LLM(model, tokenizer=FOLDER)
  vLLM: set_tokenizer
changed: get_tokenizer().apply_chat_template(messages)
  vLLM: preprocess_chat
changed: stats()
  vLLM: get_metrics do_log_stats  SGLang: get_server_info
changed: the setting prefix_cache_file, which keeps cached KV from one run to the next
  llama.cpp: save_state load_state set_cache
changed: reset_prefix_cache()
  SGLang: flush_cache  llama.cpp: reset
changed: nothing: stop asking, and open requests go on
  vLLM: pause_generation resume_generation is_paused
changed: check_health() of AsyncLLM
  vLLM: is_running is_stopped errored dead_error
changed: nothing: any profiler of processes sees the engine, as py-spy and perf do
  vLLM: start_profile stop_profile  SGLang: start_profile stop_profile
missing: images, audio and video are not supported; a model reads and writes text
  vLLM: reset_mm_cache reset_encoder_cache
changed: generate() of a list, or stream() for each prompt
  vLLM: enqueue wait_for_completion add_request
changed: generate()
  transformers: predict  llama.cpp: create_completion
changed: chat()
  llama.cpp: create_chat_completion
changed: tokenizer.encode() and tokenizer.decode()
  llama.cpp: tokenize detokenize
"""
TOKENIZER_TABLE = """\
changed: in special_tokens, by names such as "eos_token"
  transformers: eos_token bos_token pad_token unk_token special_tokens_map all_special_tokens
changed: in special_ids
  transformers: all_special_ids
changed: backend.token_to_id(token)
  transformers: convert_tokens_to_ids
changed: backend.id_to_token(token_id)
  transformers: convert_ids_to_tokens
changed: backend.get_vocab()
  transformers: get_vocab vocab
changed: backend.encode(text).tokens
  transformers: tokenize
changed: decode() of each list of ids
  transformers: batch_decode
changed: encode() of each text
  transformers: batch_encode_plus encode_plus
changed: plan.max_model_len of LLM
  transformers: model_max_length
changed: nothing: an engine takes prompts of any lengths together
  transformers: pad pad_token_id padding_side
missing: transformers.AutoTokenizer.from_pretrained(FOLDER) has all of transformers' methods
  transformers: name_or_path from_pretrained save_pretrained add_tokens add_special_tokens
"""
METHODS = {row.name: row for row in read_table(METHOD, TABLE)}
OF_TOKENIZERS = {row.name: row for row in read_table(OF_TOKENIZER, TOKENIZER_TABLE)}


def explains_methods(
    known: Mapping[str, KnownName] = METHODS,
) -> Callable[[type[Owner]], type[Owner]]:
    """Decorate a class: the AttributeError of a method that other engines have says what it is
    here. Type checkers do not see it, and go on to find misspelt names.
    """

    def decorate(owner: type[Owner]) -> type[Owner]:
        def explain(self: object, name: str) -> NoReturn:
            text = f"{owner.__name__!r} object has no attribute {name!r}"  # as Python says
            if name in known:
                text += f"; {known[name].sentence}"
            raise AttributeError(text, name=name, obj=self)

        setattr(owner, HOOK, explain)
        return owner

    return decorate
