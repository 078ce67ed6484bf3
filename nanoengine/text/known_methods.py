"""Methods of other engines that LLM and AsyncLLM lack, and what each of them is here."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from nanoengine.text.known_names import read_table

Owner = TypeVar("Owner")

METHOD = "method"
HOOK = "__getattr__"  # Python calls it for an attribute that there is not
TABLE = """\
missing: a model writes text here; it computes no embeddings, scores or classes
  vLLM: encode embed classify score reward  SGLang: encode rerank  llama.cpp: embed
missing: an engine does not sleep; close() frees its memory, and a new one loads the model again
  vLLM: sleep wake_up is_sleeping
  SGLang: release_memory_occupation resume_memory_occupation
missing: weights are loaded once, at start-up; make a new engine for new ones
  vLLM: init_weight_transfer_engine update_weights
  SGLang: update_weights_from_disk update_weights_from_tensor update_weights_from_distributed
missing: workers take no functions of yours; LLM.llm_engine has the parts of an engine
  vLLM: collective_rpc apply_model  SGLang: collective_rpc
missing: LoRA is not supported yet; merge the adapter into its model (peft: merge_and_unload)
  vLLM: add_lora remove_lora list_loras pin_lora  SGLang: load_lora_adapter unload_lora_adapter
changed: stats()
  vLLM: get_metrics do_log_stats  SGLang: get_server_info
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
METHODS = {row.name: row for row in read_table(METHOD, TABLE)}


def explains_methods(owner: type[Owner]) -> type[Owner]:
    """Decorate a class: the AttributeError of a method that other engines have says what it is
    here. Type checkers do not see it, and go on to find misspelt names.
    """

    def explain(self: object, name: str) -> NoReturn:
        text = f"{owner.__name__!r} object has no attribute {name!r}"  # as Python says
        if name in METHODS:
            text += f"; {METHODS[name].sentence}"
        raise AttributeError(text, name=name, obj=self)

    setattr(owner, HOOK, explain)
    return owner
