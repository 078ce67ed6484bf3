"""The tables of known_names.py: names of other engines, under what each of them is here.

A line that is not indented begins a group:
  works                        the name works here, too
  renamed: NAME                it takes the same values here, under this name
  changed: TEXT                here it is TEXT, with other values or another unit
  missing: TEXT                not here; TEXT says why, or what to do
  missing unless (VALUES): TEXT    the same, but these values ask for what is done here anyway
Below it, indented: engines, each with names that it has. For vLLM, FastDeploy, LMDeploy and
nano-vllm these are all names of their argument classes from 2024 to 2026, for the others the ones
that people bring most. FLAGS are those of `vllm serve` and its like that are no settings.
"""

SETTINGS = """\
works
  vLLM: model tokenizer chat_template dtype seed load_format quantization max_model_len max_num_seqs
    max_num_batched_tokens gpu_memory_utilization enable_prefix_caching enforce_eager
    attention_backend generation_config tensor_parallel_size max_num_partial_prefills
    max_long_partial_prefills long_prefill_token_threshold
  FastDeploy: model tokenizer chat_template seed quantization max_model_len max_num_seqs
    max_num_batched_tokens gpu_memory_utilization enable_prefix_caching tensor_parallel_size
    max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold
  LMDeploy: dtype enable_prefix_caching num_gpu_blocks
  nano-vllm: model max_model_len max_num_seqs max_num_batched_tokens gpu_memory_utilization
    tensor_parallel_size enforce_eager kvcache_block_size enable_cpu_offload num_gpu_blocks
  SGLang: chat_template dtype quantization load_format device attention_backend  transformers: dtype
  llama.cpp: seed  Ollama: seed
renamed: model
  LMDeploy: model_path  SGLang: model_path  transformers: pretrained_model_name_or_path
  llama.cpp: model_path
renamed: tokenizer
  SGLang: tokenizer_path
renamed: max_model_len
  LMDeploy: session_len  SGLang: context_length  llama.cpp: n_ctx ctx_size  Ollama: num_ctx
renamed: max_num_seqs
  vLLM: max_num_active_seqs
  LMDeploy: max_batch_size  SGLang: max_running_requests  llama.cpp: n_parallel parallel
  Ollama: num_parallel
renamed: max_num_batched_tokens
  LMDeploy: max_prefill_token_num  SGLang: chunked_prefill_size max_prefill_tokens
  llama.cpp: n_batch  Ollama: num_batch
renamed: kvcache_block_size
  vLLM: block_size  FastDeploy: block_size  LMDeploy: block_size cache_block_seq_len
  SGLang: page_size
renamed: num_gpu_blocks
  vLLM: num_gpu_blocks_override  FastDeploy: num_gpu_blocks_override  nano-vllm: num_kvcache_blocks
renamed: kv_offload_gib
  vLLM: kv_offloading_size swap_space  FastDeploy: swap_space  SGLang: hicache_size
renamed: ring_slots
  nano-vllm: num_kv_buffers
renamed: enforce_eager
  LMDeploy: eager_mode  SGLang: disable_cuda_graph
renamed: tensor_parallel_size
  LMDeploy: tp  SGLang: tp_size
renamed: dtype
  transformers: torch_dtype
renamed: device
  LMDeploy: device_type
renamed: seed
  SGLang: random_seed
renamed: num_threads
  llama.cpp: n_threads threads  Ollama: num_thread
changed: gpu_memory_utilization (a share of all memory, not of the free part)
  LMDeploy: cache_max_entry_count
changed: gpu_memory_utilization (a share that includes activations)
  SGLang: mem_fraction_static
changed: kv_cache_gib, in GiB
  vLLM: kv_cache_memory_bytes
changed: kv_cache_gib, of memory and not of tokens
  SGLang: max_total_tokens
changed: kv_offload_gib, in GiB and not in blocks
  LMDeploy: num_cpu_blocks  nano-vllm: num_cpu_blocks
changed: prefix_cache_file, read when an engine starts and written when it is closed
  llama.cpp: prompt_cache slot_save_path  SGLang: hicache_storage_backend
changed: kv_offload_gib, in GiB
  SGLang: hicache_ratio  llama.cpp: no_kv_offload
changed unless ('auto',): kv_offload_dtype="int8", of KV on the host only
  vLLM: kv_cache_dtype  LMDeploy: quant_policy  SGLang: kv_cache_dtype
  llama.cpp: type_k type_v cache_type_k cache_type_v
changed: decode_reserve_blocks, in blocks of all requests together
  vLLM: watermark
  FastDeploy: static_decode_blocks kv_cache_ratio prealloc_dec_block_slot_num_threshold
changed: enforce_eager, which is the opposite
  FastDeploy: use_cudagraph
changed: enable_prefix_caching, which is the opposite
  SGLang: disable_radix_cache
changed: speculative, as in speculative="ngram:4"
  vLLM: speculative_config spec_method spec_tokens num_lookahead_slots
    num_speculative_tokens ngram_prompt_lookup_max  FastDeploy: speculative_config
  LMDeploy: num_speculative_tokens
  SGLang: speculative_algorithm speculative_num_steps speculative_num_draft_tokens
changed: draft_model, a smaller model of the same family
  vLLM: spec_model speculative_model  SGLang: speculative_draft_model_path
changed: quantization="int8"
  transformers: load_in_8bit
missing: take a checkpoint in 4 bits (GGUF, AWQ or GPTQ); quantization="int8" makes 8 bits of others
  transformers: load_in_4bit
changed: quantization="int8", of weights that are stored in 16 or 32 bits
  vLLM: quantization_config allow_deprecated_quantization  transformers: quantization_config
changed: attention_backend
  transformers: attn_implementation  llama.cpp: flash_attn  vLLM: attention_config
changed: device: "cuda", "cuda:N", "cpu", ...; tensor_parallel_size takes several GPUs
  vLLM: device_ids  LMDeploy: devices  transformers: device_map  llama.cpp: main_gpu
  Ollama: main_gpu
missing unless (True,): a progress bar belongs to generate() and chat(): use_tqdm=False there
hides it
  vLLM: use_tqdm use_tqdm_on_load
changed: generation_config, and SamplingParams for single values
  vLLM: override_generation_config
changed: the environment variable NANOENGINE_LOG_LEVEL, or --log-level of the command line
  vLLM: logging_config log_config_file
  SGLang: log_level  llama.cpp: verbose  LMDeploy: log_level
missing unless (True,): here it is nothing: prefill is always chunked
  vLLM: enable_chunked_prefill  FastDeploy: enable_chunked_prefill
missing unless (0, 1): here it is nothing: the budget is always planned
  FastDeploy: use_warmup
missing: here it is nothing: preempted KV is kept where there is room
  vLLM: preemption_mode  LMDeploy: eviction_type
missing unless (False, True): here it is nothing: code from a checkpoint is never run; leave it out
  vLLM: trust_remote_code  FastDeploy: trust_remote_code  LMDeploy: trust_remote_code
  SGLang: trust_remote_code  transformers: trust_remote_code
missing: here it is nothing: code from a checkpoint is never run
  vLLM: code_revision
missing unless (0, 0.0): it offloads weights, which nanoengine cannot do; offload KV with
enable_cpu_offload=True and kv_offload_gib
  vLLM: cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group
    offload_prefetch_step offload_params  SGLang: cpu_offload_gb
missing unless (-1,): layers do not split between devices here: all weights lie on `device`, and KV
that does not fit goes to RAM with enable_cpu_offload=True
  llama.cpp: n_gpu_layers gpu_layers split_mode tensor_split  Ollama: num_gpu
  transformers: max_memory offload_folder
changed: lora, the folder or the hub id of one adapter, which all requests have
  vLLM: lora_modules  LMDeploy: adapters  SGLang: lora_paths  llama.cpp: lora_path
missing unless (False,): one LoRA adapter is added to the weights as they are loaded: give its
folder as lora, and it is on for all requests
  vLLM: enable_lora max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras
    lora_dtype lora_extra_vocab_size lora_target_modules enable_tower_connector_lora
    max_lora_cls_labels specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras
  SGLang: enable_lora max_loras_per_batch  llama.cpp: lora_base
missing unless (False,): images, audio and video are not supported; a model reads and writes text
  vLLM: limit_mm_per_prompt enable_mm_embeds interleave_mm_strings media_io_kwargs
    mm_processor_kwargs disable_mm_preprocessor_cache mm_processor_cache_gb mm_processor_cache_type
    mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
    mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling
    video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
    mm_device_do_normalize enable_mm_processor_stats disable_chunked_mm_input
    allowed_local_media_path allowed_media_domains enable_multimodal_encoder_data_parallel
    ec_transfer_config ec_manager_config diffusion_config
  FastDeploy: enable_mm limit_mm_per_prompt mm_processor_kwargs max_encoder_cache
    max_processor_cache disable_chunked_mm_input  LMDeploy: vision_config  llama.cpp: mmproj
missing unless (True,): here it is nothing: only the text part of a model is ever run
  vLLM: language_model_only  LMDeploy: disable_vision_encoder language_model_only
  nano-vllm: is_multimodal
missing unless (0, 1, False): tensor_parallel_size is the only way for one engine to use several
GPUs; or start an engine for each GPU
  vLLM: pipeline_parallel_size data_parallel_size data_parallel_rank data_parallel_start_rank
    data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb
    data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend
    dp_sync_interval prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend
    dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
    distributed_executor_backend distributed_timeout_seconds cpu_distributed_timeout_seconds
    master_addr master_port nnodes node_rank max_parallel_loading_workers disable_custom_all_reduce
    disable_nccl_for_dp_synchronization enable_nccl_comm_suspend ray_workers_use_nsight
    worker_use_ray worker_cls worker_extension_cls enable_dbo ubatch_size dbo_decode_token_threshold
    dbo_prefill_token_threshold enable_batch_sharded_sampling enable_fault_tolerance
    fault_tolerance_config enable_hc_sp enable_shm_tensor_arena pp
  FastDeploy: data_parallel_size local_data_parallel_id disable_custom_all_reduce
    enable_flashinfer_allreduce_fusion use_internode_ll_two_stage shutdown_comm_group_if_worker_idle
    ips engine_worker_queue_port cache_queue_port pd_comm_port rdma_comm_ports
  LMDeploy: dp dp_rank cp device_num attn_tp_size attn_cp_size attn_dp_size mlp_tp_size mlp_dp_size
    outer_dp_size communicator distributed_executor_backend should_execute_dummy_batch
    enable_microbatch enable_mp_engine mp_engine_backend nnodes node_rank dist_init_addr
  SGLang: dp_size pp_size nnodes node_rank dist_init_addr base_gpu_id
missing unless (1,): every process holds its part of each expert; there is no other way to divide
or to run them
  vLLM: enable_expert_parallel enable_ep_weight_filter moe_backend all2all_backend enable_elastic_ep
    eplb_config enable_eplb expert_placement_strategy num_redundant_experts eplb_window_size
    eplb_step_interval eplb_log_balancedness enable_return_routed_experts enable_bf16x3_router_gemm
    elastic_ep_max_dp_size
  FastDeploy: enable_expert_parallel disable_sequence_parallel_moe enable_chunked_moe
    chunked_moe_size enable_eplb eplb_config routing_replay_config
  LMDeploy: ep enable_eplb enable_return_routed_experts moe_tp_size  SGLang: ep_size
changed: a flag of `nanoengine serve`, --served-model-name, --host, --port or --api-key; an LLM in
Python does not listen
  vLLM: served_model_name host port api_key  FastDeploy: served_model_name port
  LMDeploy: server_name server_port  SGLang: served_model_name host port api_key
changed: --max-open-texts of `nanoengine serve`, which counts the texts that run or wait
  vLLM: max_num_queued_reqs  FastDeploy: max_concurrency
changed: --queue-seconds of `nanoengine serve`, in seconds
  FastDeploy: max_waiting_time
changed: --drain-seconds of `nanoengine serve`, in seconds
  vLLM: shutdown_timeout
missing: `nanoengine serve` has one scheduler, and shows its metrics at /metrics
  vLLM: max_num_queued_tokens io_processor_plugin renderer_num_workers
  FastDeploy: metrics_port router
    skip_port_check scheduler_name scheduler_max_size scheduler_ttl scheduler_host scheduler_port
    scheduler_db scheduler_password scheduler_topic scheduler_min_load_score
    scheduler_load_shards_num scheduler_sync_period scheduler_expire_period
    scheduler_release_load_expire_period scheduler_reader_parallel scheduler_writer_parallel
    scheduler_reader_batch_size scheduler_writer_batch_size tokenizer_base_url
missing: llguidance reads all grammars; a request gives one in structured_outputs of SamplingParams
  vLLM: structured_outputs_config guided_decoding_backend guided_decoding_disable_fallback
    guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties
  FastDeploy: guided_decoding_backend guided_decoding_disable_any_whitespace
  SGLang: grammar_backend
missing unless (False, True): here it is nothing: tools may always be called; leave it out
  vLLM: enable_auto_tool_choice
missing: LLM.chat and the server read thoughts and tool calls; which parser, its template says, or
the server's --tool-call-parser and --reasoning-parser
  vLLM: reasoning_parser reasoning_parser_plugin reasoning_config tool_call_parser
    tool_parser_plugin
  FastDeploy: reasoning_parser tool_call_parser tool_parser_plugin
  LMDeploy: reasoning_parser tool_call_parser  SGLang: reasoning_parser tool_call_parser
changed: chat_template, a file of Jinja code or the code
  LMDeploy: chat_template_config  llama.cpp: chat_format chat_handler  Ollama: template
missing: code that changes logits is not supported; there are logit_bias, allowed_token_ids and
bad_words of SamplingParams
  vLLM: logits_processors logits_processor_pattern  FastDeploy: logits_processors
  SGLang: enable_custom_logit_processor
missing unless ('main', 'master'): a hub id stands for its main revision; to take another one, run
`hf download MODEL --revision REVISION` and give the folder that it prints
  vLLM: revision tokenizer_revision  FastDeploy: revision  LMDeploy: revision  SGLang: revision
  transformers: revision
missing unless (True,): the huggingface_hub library reads the environment: put the token into
HF_TOKEN, or run `hf auth login` once
  vLLM: hf_token  transformers: token use_auth_token
missing: the huggingface_hub library reads the environment: HF_HUB_CACHE names the folder of
downloads
  vLLM: download_dir  LMDeploy: download_dir  SGLang: download_dir  transformers: cache_dir
missing unless (False,): the huggingface_hub library reads the environment: HF_HUB_OFFLINE=1 forbids
downloads
  transformers: local_files_only force_download proxies
missing: the model's config.json is read as it is; change it in a copy of the folder
  vLLM: hf_overrides hf_config_path config_format rope_scaling rope_theta model_class_overrides
  FastDeploy: model_config_name
  LMDeploy: hf_overrides rope_scaling_factor use_logn_attn model_name custom_module_map
  nano-vllm: hf_config eos  SGLang: json_model_override_args
  llama.cpp: rope_freq_base rope_freq_scale rope_scaling_type yarn_ext_factor
  Ollama: rope_frequency_base rope_frequency_scale
missing unless (False,): here it is nothing: a window is the one in the model's config.json
  vLLM: disable_sliding_window  LMDeploy: window_size
missing unless ('hf', True): here it is nothing: the form of the weights is read from the model's
files
  LMDeploy: model_format  FastDeploy: load_choices  transformers: use_safetensors variant gguf_file
missing: there is one way to read weights, and nothing to choose
  vLLM: safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
    model_loader_extra_config ignore_patterns pt_load_map_location  llama.cpp: use_mmap use_mlock
  Ollama: use_mmap use_mlock  transformers: low_cpu_mem_usage
missing: weights are loaded once, at start-up; make a new LLM for new ones
  vLLM: weight_transfer_config model_weights
  FastDeploy: dynamic_load_weight load_strategy rsync_config  LMDeploy: empty_init
missing unless ('auto', True): the fast tokenizer of tokenizer.json or of the GGUF is always used
  vLLM: tokenizer_mode tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config
  SGLang: tokenizer_mode  transformers: use_fast
missing unless (False,): the tokenizer is always loaded; token ids can be prompts, and
detokenize=False of SamplingParams leaves the texts out
  vLLM: skip_tokenizer_init tokens_only  SGLang: skip_tokenizer_init  llama.cpp: vocab_only
missing unless (False,): a prompt is text or token ids, not embeddings
  vLLM: enable_prompt_embeds  llama.cpp: embedding embeddings
missing unless ('generate', 'none', 'auto', False): models generate text; embedding, reward and
classification models are not supported
  vLLM: runner convert task pooler_config override_pooler_config
  FastDeploy: runner convert task override_pooler_config  SGLang: is_embedding
missing unless ('auto',): there is one implementation of each architecture
  vLLM: model_impl  FastDeploy: model_impl
missing: graph sizes cannot be chosen yet; enforce_eager=True turns graphs off
  vLLM: cuda_graph_sizes cudagraph_capture_sizes max_cudagraph_capture_size max_seq_len_to_capture
    max_context_len_to_capture
  LMDeploy: cudagraph_capture_batch_sizes  SGLang: cuda_graph_max_bs cuda_graph_bs
missing unless (False,): PyTorch compiles nothing here; enforce_eager=True turns CUDA graphs off
  vLLM: compilation_config optimization_level performance_mode
  FastDeploy: graph_optimization_config  SGLang: enable_torch_compile  transformers: compile
missing unless (False,): kernels are chosen by the engine; attention_backend chooses those of
attention
  vLLM: kernel_config linear_backend ir_op_priority enable_flashinfer_autotune gdn_prefill_backend
    kda_prefill_backend kda_decode_backend sparse_indexer_topk_backend disable_cascade_attn
    override_attention_dtype kv_sharing_fast_prefill
    jit_monitor_mode jit_monitor_verbose  FastDeploy: plas_attention_config lm_head_fp32
  LMDeploy: kernel_block_size  SGLang: sampling_backend
missing: here it is nothing: a recurrent state has its model's own type, and snapshots of it lie at
the ends of blocks
  vLLM: mamba_config mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode
    mamba_ssm_cache_dtype mamba_ssu_algorithm mamba_cache_philox_rounds
    enable_mamba_cache_stochastic_rounding use_replayssm replayssm_buffer_len prefix_match_unit
    enable_mamba_shared_prefix_checkpoint
missing: diffusion models are not supported
  LMDeploy: dllm_block_length dllm_unmasking_strategy dllm_denoising_steps dllm_confidence_threshold
missing unless ('mixed', 'native', False): KV does not move between engines; kv_offload_gib keeps it
in this machine's RAM
  vLLM: kv_transfer_config kv_events_config kv_offloading_backend
  FastDeploy: splitwise_role innode_prefill_ports cache_transfer_protocol kvcache_storage_backend
    write_policy  LMDeploy: role migration_backend enable_transfer_obj_ref
  SGLang: disaggregation_mode enable_hierarchical_cache
missing unless (False,): host KV in int8 has a scale for each token and head, and needs no choice of
layers
  vLLM: calculate_kv_scales kv_cache_dtype_skip_layers
missing: cached KV is found by a hash that is checked against the tokens, and stays until its memory
is needed
  vLLM: prefix_caching_hash_algo prefix_cache_retention_interval swa_bounded_replay
  LMDeploy: cache_chunk_size cache_checkpoint_interval cache_prompt_boundary_skip
    prefix_cache_state_budget prefix_cache_decode_state_interval
missing unless (True,): here it is nothing: KV of the output is cached like that of the prompt
  FastDeploy: enable_output_caching  LMDeploy: cache_prompt cache_generation
missing unless (False,): here it is nothing: one manager keeps all KV
  vLLM: disable_hybrid_kv_cache_manager use_v2_block_manager
missing unless ('fcfs',): requests run in the order of their arrival; max_num_partial_prefills and
long_prefill_token_threshold let short ones pass long ones
  vLLM: scheduling_policy scheduler_cls scheduler_reserve_full_isl max_num_scheduled_tokens
    prefill_schedule_interval scheduler_delay_factor long_prefill_token_threshold_adaptive
  LMDeploy: max_prefill_iters num_tokens_per_iter prefill_interval
  SGLang: schedule_policy schedule_conservativeness
missing unless (True,): here it is nothing: on a GPU the next step is begun before the last one is
read
  vLLM: async_scheduling disable_async_output_proc  FastDeploy: enable_overlap_schedule
  LMDeploy: async_  SGLang: disable_overlap_schedule
missing unless (1,): a stream brings every token as soon as it is known
  vLLM: stream_interval  SGLang: stream_interval
missing unless (True, 20): here it is nothing: a request asks for logprobs by
SamplingParams(logprobs=N), N up to 20
  vLLM: max_logprobs  FastDeploy: enable_logprob max_logprobs  llama.cpp: logits_all
missing unless ('raw_logprobs',): logprobs are always those of the model's own distribution, before
penalties
  vLLM: logprobs_mode return_sampling_mask use_fp64_gumbel enable_trace_replay
  FastDeploy: logprobs_mode enable_keep_sampling_mask enable_entropy  LMDeploy: logprobs_mode
missing unless (False,): stop strings and tokens of SamplingParams end a text; there is no detector
of loops
  FastDeploy: enable_early_stop early_stop_config
missing unless (True, False, 'none', 'warn'): what a request took is in its output's metrics;
nothing is reported elsewhere
  vLLM: disable_log_stats aggregate_engine_logging show_hidden_metrics_for_version
    otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics kv_cache_metrics
    kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
    enable_logging_iteration_details profiler_config custom_histogram_buckets
    aux_output_config  LMDeploy: enable_metrics
  SGLang: enable_metrics log_requests
missing unless (False,): an engine does not sleep; close() frees its memory
  vLLM: enable_sleep_mode enable_cumem_allocator sleep_mode_offload_cudagraph
    sleep_preserve_parameter_names  SGLang: enable_memory_saver  Ollama: keep_alive
missing unless (False,): one thread at a time may call an LLM; AsyncLLM may be called from all of
them
  LMDeploy: thread_safe
missing: memory is bound to no NUMA node; start Python under numactl
  vLLM: numa_bind numa_bind_nodes numa_bind_cpus  llama.cpp: numa  Ollama: numa
missing: a text has no watermark
  vLLM: watermark_config
missing: there are no plug-ins and no settings outside this list
  vLLM: additional_config external_parameters fail_on_environ_validation engram_config
"""

PARAMETERS = """\
works
  vLLM: n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed
    stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs detokenize
    skip_special_tokens include_stop_str_in_output logit_bias allowed_token_ids bad_words
    structured_outputs thinking_token_budget
  FastDeploy: n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p
    seed stop stop_token_ids max_tokens min_tokens logprobs bad_words
  LMDeploy: n repetition_penalty temperature top_p top_k min_p ignore_eos stop_token_ids
    skip_special_tokens logprobs bad_words include_stop_str_in_output
  nano-vllm: temperature top_p max_tokens ignore_eos
  SGLang: n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p stop
    stop_token_ids ignore_eos skip_special_tokens logit_bias
  transformers: repetition_penalty temperature top_p top_k min_p
  llama.cpp: presence_penalty frequency_penalty temperature top_p top_k min_p seed stop logit_bias
    max_tokens  Ollama: presence_penalty frequency_penalty temperature top_p top_k min_p seed stop
  OpenAI: n presence_penalty frequency_penalty temperature top_p seed stop max_tokens logit_bias
renamed: max_tokens
  LMDeploy: max_new_tokens  SGLang: max_new_tokens  transformers: max_new_tokens
  llama.cpp: n_predict  Ollama: num_predict  OpenAI: max_completion_tokens max_output_tokens
renamed: thinking_token_budget
  FastDeploy: reasoning_max_tokens
renamed: min_tokens
  LMDeploy: min_new_tokens  SGLang: min_new_tokens  transformers: min_new_tokens
renamed: seed
  LMDeploy: random_seed  SGLang: sampling_seed
renamed: stop
  LMDeploy: stop_words  transformers: stop_strings
renamed: repetition_penalty
  llama.cpp: repeat_penalty  Ollama: repeat_penalty
renamed: n
  transformers: num_return_sequences
renamed: logprobs
  OpenAI: top_logprobs  llama.cpp: n_probs
renamed: include_stop_str_in_output
  SGLang: no_stop_trim
changed: stop_token_ids, a list that is added to the model's own
  transformers: eos_token_id
changed: bad_words, of texts; a token id is forbidden by logit_bias={ID: -100}
  FastDeploy: bad_words_token_ids  LMDeploy: bad_token_ids
  transformers: bad_words_ids suppress_tokens
changed: logit_bias, from token ids to numbers
  transformers: sequence_bias
changed: max_tokens, which does not count the prompt
  transformers: max_length
changed: min_tokens, which does not count the prompt
  transformers: min_length
changed unless (False,): logprobs, of the likeliest tokens
  vLLM: logprob_token_ids flat_logprobs  transformers: output_scores return_dict_in_generate
changed unless (False,): prompt_logprobs, of the whole prompt
  vLLM: prompt_logprob_token_ids prompt_logprob_start  LMDeploy: return_ppl  OpenAI: echo
changed: speculative of the engine, as in LLM(model, speculative="ngram:4")
  transformers: prompt_lookup_num_tokens num_assistant_tokens
changed: draft_model of the engine, a smaller model of the same family
  transformers: assistant_model
changed: a prompt's own cache_salt, as in {"prompt": text, "cache_salt": "a"}
  vLLM: skip_reading_prefix_cache  llama.cpp: cache_prompt
missing unless (True,): temperature=0 takes the likeliest token, and temperature above 0 samples
  LMDeploy: do_sample  transformers: do_sample
missing unless (1, 1.0, False): beam search is llm.beam_search(prompts, beam_width=4, max_tokens=64)
  vLLM: use_beam_search beam_width length_penalty early_stopping
  transformers: num_beams num_beam_groups length_penalty early_stopping diversity_penalty
    constraints force_words_ids
missing unless (1,): take n and logprobs=0, and choose the output with the highest
cumulative_logprob
  vLLM: best_of  FastDeploy: best_of  OpenAI: best_of
changed: structured_outputs={"json": schema}
  vLLM: guided_json json  FastDeploy: guided_json  SGLang: json_schema  llama.cpp: json_schema
  Ollama: format  LMDeploy: response_format  OpenAI: response_format
changed: structured_outputs={"regex": pattern}
  vLLM: guided_regex regex  FastDeploy: guided_regex  SGLang: regex
changed: structured_outputs={"choice": [texts]}
  vLLM: guided_choice choice  FastDeploy: guided_choice
changed: structured_outputs={"grammar": text}
  vLLM: guided_grammar grammar  FastDeploy: guided_grammar  SGLang: ebnf  llama.cpp: grammar
changed: structured_outputs={"json_object": True}
  vLLM: guided_json_object json_object  FastDeploy: guided_json_object
changed: structured_outputs, a StructuredOutputsParams or a dict of its fields
  vLLM: guided_decoding  FastDeploy: guided_decoding
missing: structured_outputs has json, regex, choice, grammar and json_object, and one way to read
them; a JSON schema says additionalProperties itself
  vLLM: guided_decoding_backend guided_whitespace_pattern structural_tag disable_any_whitespace
    disable_additional_properties whitespace_pattern disable_fallback
  FastDeploy: structural_tag  SGLang: structural_tag
missing: this way to choose tokens is not supported; there are temperature, top_k, top_p, min_p and
penalties
  transformers: typical_p epsilon_cutoff eta_cutoff top_h penalty_alpha no_repeat_ngram_size
    encoder_no_repeat_ngram_size encoder_repetition_penalty exponential_decay_length_penalty
    guidance_scale dola_layers renormalize_logits remove_invalid_values watermarking_config
    begin_suppress_tokens
  llama.cpp: typical_p tfs_z top_n_sigma xtc_probability xtc_threshold mirostat mirostat_tau
    mirostat_eta mirostat_mode dry_multiplier dry_base dry_allowed_length dry_penalty_last_n
    dry_sequence_breakers dynatemp_range dynatemp_exponent samplers
  Ollama: typical_p tfs_z mirostat mirostat_tau mirostat_eta
missing: here it is nothing: penalties count every token, those of the prompt in repetition_penalty
only
  llama.cpp: repeat_last_n penalize_nl  Ollama: repeat_last_n penalize_newline
missing: code that changes logits is not supported; there are logit_bias, allowed_token_ids and
bad_words of SamplingParams
  vLLM: logits_processors  LMDeploy: logits_processors  SGLang: custom_logit_processor
  transformers: logits_processor prefix_allowed_tokens_fn  llama.cpp: logits_processor
missing: stop strings and tokens end a text; there are no other conditions
  vLLM: repetition_detection  LMDeploy: repetition_ngram_size repetition_ngram_threshold
  transformers: stopping_criteria max_time
  llama.cpp: stopping_criteria t_max_predict_ms
missing: generate() returns whole texts, and stream() brings new text as it comes
  vLLM: output_kind stream_interval output_text_buffer_length  SGLang: stream_interval
  transformers: streamer
missing unless (True,): here it is nothing: spaces are those of the tokenizer
  vLLM: spaces_between_special_tokens  LMDeploy: spaces_between_special_tokens
  SGLang: spaces_between_special_tokens  transformers: clean_up_tokenization_spaces
missing unless (True,): here it is nothing: prompts are not padded, and KV is always cached
  transformers: pad_token_id use_cache cache_implementation attention_mask padding_side bos_token_id
    decoder_start_token_id low_memory
missing unless (False,): a chat has the special tokens of its template, a text those of the
tokenizer; ids have no others
  vLLM: add_special_tokens
missing: prompts are never cut; a prompt that is too long is an error that names the limit
  vLLM: truncate_prompt_tokens  llama.cpp: n_keep n_discard  Ollama: num_keep truncate
missing: whether a model thinks, and how much, its chat template takes, as chat_template_kwargs;
thinking_token_budget limits the tokens
  OpenAI: reasoning_effort  Ollama: think
missing unless (False,): only tokens and their logprobs come out of the model
  LMDeploy: output_logits output_last_hidden_state
  transformers: output_hidden_states output_attentions
missing unless (False,): logprobs are always those of the model's own distribution, before penalties
  FastDeploy: temp_scaled_logprobs top_p_normalized_logprobs
missing: KV does not move between engines; kv_offload_gib keeps it in this machine's RAM
  LMDeploy: with_cache preserve_cache migration_request
missing unless (False,): an answer does not say which experts computed it
  vLLM: routed_experts_prompt_start  LMDeploy: return_routed_experts
missing unless (True,): a text has no watermark
  vLLM: watermarking
missing: there are no parameters outside this list
  vLLM: extra_args skip_clone trace_decode_token_ids  FastDeploy: stop_seqs_len
  SGLang: custom_params
missing: one LoRA adapter is of the whole engine: LLM(model, lora=FOLDER)
  vLLM: lora_request  Ollama: adapter
"""

ARGUMENTS = """\
missing: tools are arguments of chat(messages, tools=[...], tool_choice=...)
  vLLM: tools tool_choice  LMDeploy: tools  Ollama: tools
  OpenAI: tools tool_choice functions function_call parallel_tool_calls
missing: give variables of the chat template in chat_template_kwargs={...}
  transformers: documents enable_thinking
missing unless (False,): render the messages with llm.get_tokenizer().apply_chat_template(messages),
and give generate() the ids of encode(text, add_special_tokens=False)
  transformers: tokenize return_dict return_tensors
missing: another template is a setting of the engine, LLM(..., chat_template=file)
  vLLM: chat_template  FastDeploy: chat_template
missing unless ('auto',): how a template takes parts of a content is tried out; leave it out
  vLLM: chat_template_content_format
missing: give token ids as the prompt: llm.generate([1, 2, 3]) or {"prompt_token_ids": [1, 2, 3]}
  vLLM: prompt_token_ids  SGLang: input_ids  transformers: input_ids inputs_embeds
missing: give it as the first argument, without a name
  vLLM: prompt inputs  SGLang: prompt  transformers: text_inputs inputs  llama.cpp: prompt
  Ollama: prompt  OpenAI: prompt input
missing: here it is sampling_params, a SamplingParams
  vLLM: params  LMDeploy: gen_config  transformers: generation_config generate_kwargs
  Ollama: options
missing unless (False,): use llm.stream(prompt, params), llm.stream_chat(messages, params) or
AsyncLLM
  SGLang: stream  llama.cpp: stream  Ollama: stream  OpenAI: stream stream_options
missing: images, audio and video are not supported; a model reads and writes text
  vLLM: multi_modal_data mm_processor_kwargs  LMDeploy: images  SGLang: image_data audio_data
  transformers: images  Ollama: images  OpenAI: modalities audio
missing: one LoRA adapter is of the whole engine: LLM(model, lora=FOLDER)
  vLLM: lora_request prompt_adapter_request  LMDeploy: adapter_name  SGLang: lora_path
missing unless (0,): requests run in the order of their arrival
  vLLM: priority data_parallel_rank
missing: give both in the prompt: {"prompt_token_ids": ids, "prompt": text}
  vLLM: prompt_text
missing: here it is nothing: whether a prompt has begun thoughts is read from it
  vLLM: reasoning_ended reasoning_parser_kwargs
missing: what a request took is in its output's metrics; nothing is reported elsewhere
  vLLM: trace_headers
missing: KV of earlier turns is found by the tokens of the prompt
  vLLM: session_id kv_hints
missing: give it in the prompt: {"prompt": text, "cache_salt": "a"}
  vLLM: cache_salt
missing: ask by structured_outputs of SamplingParams
  vLLM: guided_options_request
missing: here it is nothing: a prompt is encoded whole, and never cut
  vLLM: tokenization_kwargs
missing: the model was chosen when the LLM was made
  OpenAI: model  Ollama: model
missing unless (False,): an output has texts and token ids, and the prompt's
  transformers: return_full_text return_text  OpenAI: user metadata store
"""

FLAGS = """\
renamed: gpu_memory_utilization
  vLLM: device_memory_utilization
renamed: tokenizer_info
  vLLM: enable_tokenizer_info_endpoint
renamed: keep_alive_seconds
  vLLM: sse_keep_alive_interval
changed: --allow-origins https://HOST, once for each origin
  vLLM: allowed_origins
missing: pages of the origins in --allow-origins may send all methods and headers, but no cookies
  vLLM: allowed_methods allowed_headers allow_credentials
missing: here it is nothing: requests are not logged, and the server's lines are those of
--log-level; leave it out
  vLLM: disable_log_requests enable_log_requests enable_log_outputs enable_log_deltas max_log_len
    disable_uvicorn_access_log disable_access_log_for_endpoints
changed: --log-level
  vLLM: uvicorn_log_level
changed: the environment variable NANOENGINE_TRACEBACK=1, for commands; a server logs its own faults
  vLLM: log_error_stack
missing: here it is nothing: thoughts are read wherever the chat template writes them;
--reasoning-parser names another way
  vLLM: enable_reasoning
missing: the server speaks no TLS; put a proxy such as nginx or Caddy in front of it
  vLLM: ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh
missing: paths begin at /; let the proxy in front take its prefix away before it passes a request on
  vLLM: root_path
missing: the server listens at --host and --port alone
  vLLM: uds grpc grpc_port
missing: the server runs no code of others; put a proxy in front of it
  vLLM: middleware
missing: here it is nothing: an answer always has the cached tokens of its prompt; leave it out
  vLLM: enable_prompt_tokens_details
missing: a stream ends with its usage where the request's stream_options has include_usage
  vLLM: enable_force_include_usage
missing: /metrics shows the load and the times of all requests
  vLLM: enable_server_load_tracking enable_per_request_metrics
missing: each request gives its own chat_template_kwargs or reasoning_effort
  vLLM: default_chat_template_kwargs anthropic_disabled_thinking_effort
missing: here it is nothing: only the model's own chat template is ever run; leave it out
  vLLM: trust_request_chat_template trust_request_mm_kwargs cohere_format cohere_is_reasoning_model
missing: here it is nothing: an answer's role is assistant
  vLLM: response_role
missing: tools are functions of the client; one with "strict": true is held to its schema
  vLLM: tool_server tool_strict_level exclude_tools_when_tool_choice_none
missing: log-probabilities name tokens by their text and bytes
  vLLM: return_tokens_as_token_ids
missing: one process serves HTTP; --engine-process puts the engine into another one
  vLLM: api_server_count headless disable_frontend_multiprocessing data_parallel_supervisor_port
    dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s
    dp_supervisor_probe_failure_threshold enable_scale_out
missing: the server has no such switch; `nanoengine serve --help` lists what there is
  vLLM: enable_request_id_headers disable_fastapi_docs enable_offline_docs fingerprint_mode
    fingerprint_value h11_max_incomplete_event_size h11_max_header_count
    enable_flash_late_interaction
missing: `nanoengine batch IN.jsonl OUT.jsonl --model MODEL` names the files without flags
  vLLM: input_file output_file output_tmp_dir i o
"""
