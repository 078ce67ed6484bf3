"""Forecasts what a model needs and how fast it decodes on a machine, from its shape alone.

Divides the memory with memory_plan's own arithmetic, for hardware that need not be here. Loads
nothing and measures nothing: speeds follow from bandwidths that the caller assumes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from nanoengine.config.engine import GIB, EngineConfig, in_gib
from nanoengine.config.model import AssistantConfig, ModelConfig
from nanoengine.errors import ConfigError, OutOfMemoryError
from nanoengine.kernels.cpu_linear import NO_BFLOAT16
from nanoengine.kernels.packed_weight import INTEGER_FORMATS
from nanoengine.loading.draft_model import read_draft_model, settings_of_draft
from nanoengine.loading.stored_weights import StoredWeights, read_stored, said_weights
from nanoengine.models.assistant import num_weights
from nanoengine.models.experts import ON_A_GPU
from nanoengine.models.make_codes import EMBEDDINGS
from nanoengine.models.shard import WHOLE, Shard
from nanoengine.models.weight_shapes import weight_shapes
from nanoengine.startup.device_limits import (
    check_device,
    codes_without_kernels,
    rows_without_codes,
)
from nanoengine.startup.memory_plan import Memory, ModelFacts, plan_memory
from nanoengine.startup.plan import GIB_STEPS, MemoryPlan, gib_up
from nanoengine.startup.rank_share import MemoryShare, memory_settings_of_a_rank
from nanoengine.startup.weight_bytes import (
    NARROW,
    WeightForm,
    layer_matrices,
    no_codes,
    weight_bytes,
)

# What CUDA's context and the kernels' code take on a GPU beside torch's tensors.
CUDA_CONTEXT_BYTES = GIB // 2
# The share of the memory's bandwidth that a decode step reaches: Llama-3.1-8B's shapes on an H200.
READ_EFFICIENCY = 0.82
# Bytes of a weight in a GGUF of 4 bits: Q4_K_M has Q6_K, too. Q5_K takes 0.69.
FOUR_BITS = 0.65
# Tokens of a step, and of a layer in a buffer, on a GPU that is full without them.
SMALL = {"max_num_batched_tokens": 512, "slot_tokens": 4096}
FEW = SMALL | {"max_num_seqs": 4}  # whose logits take less


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine. gpu_bytes: all memory of its GPU (0: it has none). ram_bytes: RAM that the engine
    may take. read_gb_per_s: of the memory that weights lie in; link_gb_per_s: from RAM to GPU. Of
    several GPUs, each has this memory, and the slowest link is this fast while all copy.
    auto_dtype: what the setting dtype="auto" takes there. read_efficiency: the share of
    read_gb_per_s that a step reaches; kv_gb_per_s: at which it reads KV (0: as weights); layer_s:
    seconds that each layer takes beside; held_share: as of MachineSpeed, in bfloat16. A plan leaves
    room for all of these bytes, as the numbers say what they can be held in. no_kernels: why a CPU
    does not compute by kernels of our own; "" if it does.
    """

    gpu_bytes: int
    ram_bytes: int
    read_gb_per_s: float
    link_gb_per_s: float
    auto_dtype: torch.dtype = torch.bfloat16
    read_efficiency: float = READ_EFFICIENCY
    kv_gb_per_s: float = 0.0
    layer_s: float = 0.0
    held_share: float = 1.0
    no_kernels: str = ""

    @property
    def name(self) -> str:
        """The device's name in a plan."""
        return "cuda" if self.gpu_bytes else "cpu"


@dataclass(frozen=True, slots=True)
class Forecast:
    """What fits and how fast it is.

    plan: the division of memory, with `settings`; as an engine's plan, it is of the first rank.
    weights: bytes that each rank holds; whole_bytes: that one process would; held_in: as what.
    longest: the most
    tokens that any settings reach, with its speed. context: tokens of the request that plan,
    settings and tokens_per_s are for. reserved_bytes: of the GPU, not used. active_bytes: of
    whole_bytes, those of a token's experts and of all that is no expert. is_link_bound: copies from
    RAM limit the speed. refusal: why the wanted context cannot be reached; "" if it can.
    """

    model: ModelConfig
    plan: MemoryPlan
    settings: Mapping[str, Any]
    longest: int
    longest_tokens_per_s: float
    context: int
    tokens_per_s: float
    reserved_bytes: int
    weights: tuple[int, ...]
    whole_bytes: int
    held_in: str
    active_bytes: int
    is_link_bound: bool
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class _Planned:
    """The memory of a machine that is not here, with the weights in it (memory_plan.Memory)."""

    hardware: Hardware
    weight_bytes: int

    @property
    def name(self) -> str:
        return self.hardware.name

    @property
    def computes_later(self) -> bool:
        return bool(self.hardware.gpu_bytes)

    def memory(self) -> tuple[int, int]:
        total, used = self.hardware.gpu_bytes, self.weight_bytes + CUDA_CONTEXT_BYTES
        if not total:
            total, used = self.hardware.ram_bytes, self.weight_bytes
        return max(0, total - used), total

    def host_memory(self) -> int:
        return max(0, self.hardware.ram_bytes - (0 if self.computes_later else self.weight_bytes))


@dataclass(frozen=True, slots=True)
class _Fit:
    """A division of the memory, and the settings that make it."""

    config: EngineConfig
    plan: MemoryPlan

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are not the default, as keywords of LLM."""
        given = asdict(EngineConfig(self.config.model))
        found = asdict(self.config)
        return {name: value for name, value in found.items() if value != given[name]}


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """A draft model with KV of its own, and its files."""

    model: ModelConfig
    stored: StoredWeights


def read_guesser(config: EngineConfig, model: ModelConfig) -> AssistantConfig | DraftWeights | None:
    """What `draft_model` names, for `model`; None: it names nothing. Raises as read_draft_model."""
    if not config.num_assisted:
        return None
    found = read_draft_model(config, model)
    if isinstance(found, AssistantConfig):
        return found
    return DraftWeights(found, read_stored(str(config.draft_model), found))


class Forecaster:
    """Plans one model on one machine with different settings."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        hardware: Hardware,
        stored: StoredWeights | None = None,
        guesser: AssistantConfig | DraftWeights | None = None,
    ) -> None:
        """config: the settings that the user gave, which are planned with. stored: the model's
        files; None: they are as its config.json says. guesser: what `draft_model` names.
        Raises ConfigError for settings that the device does not take.
        """
        if not hardware.gpu_bytes:  # a CPU's KV needs no second tier
            config = replace(
                config, enable_cpu_offload=False, kv_offload_gib=None, kv_offload_dtype=None
            )
        self._config = config
        stored = stored or said_weights(model)
        if stored.has_own_head:
            model = replace(model, tie_word_embeddings=False)
        self._model = model
        self._stored = stored
        self._hardware = hardware
        is_asked = config.dtype != "auto"
        dtype: torch.dtype = getattr(torch, config.dtype) if is_asked else hardware.auto_dtype
        self._dtype = dtype
        check_device(config, _kind(config, hardware), dtype, model)
        self._ranks = config.tensor_parallel_size
        self._shards = [Shard(rank, self._ranks) for rank in range(self._ranks)]
        self._shards[0].check(model)
        self._part = self._shards[0].config(model)
        self._form = form = self._weight_form()
        self._guesser = guesser
        beside = self._beside()
        self._whole, *self._weights = (
            replace(each, held=each.held + beside)
            for each in (weight_bytes(model, shard, form) for shard in (WHOLE, *self._shards))
        )
        held = [each.held for each in self._weights]
        # On the fullest GPU, or of all ranks in the RAM that they share.
        self._weight_bytes = max(held) if hardware.gpu_bytes else sum(held)
        machine = _Planned(hardware, self._weight_bytes)
        of_gpus = machine.memory() if hardware.gpu_bytes else None
        self._memory: Memory = MemoryShare(machine, self._ranks, of_gpus)

    def _beside(self) -> int:
        """Bytes of the weights of what guesses for the model."""
        if isinstance(self._guesser, AssistantConfig):
            return self._dtype.itemsize * num_weights(self._guesser)
        if self._guesser is None:
            return 0
        model, own = self._guesser.model, settings_of_draft(self._config)
        return Forecaster(own, model, self._hardware, self._guesser.stored)._whole.held

    def _weight_form(self) -> WeightForm:
        """Raises ConfigError for experts that a GPU does not take, and for codes that are none or
        no integers, where these are asked for.
        """
        model, dtype, method = self._model, self._dtype, self._config.quantization
        has_gpu = self._hardware.gpu_bytes > 0
        if method == "gguf" and not self._stored.has_codes:
            raise no_codes(method)
        needs_kernels = method in ("int8", "gguf") or self._config.activation_dtype is not None
        if needs_kernels and not has_gpu and not self._has_own_products():
            raise codes_without_kernels(self._config, self._hardware.no_kernels or NO_BFLOAT16)
        packs = not has_gpu and self._has_own_products()
        form = WeightForm(dtype, self._stored.forms, method == "int8", self._keeps_codes(), packs)
        experts = layer_matrices(model, experts_only=True)
        are_codes = all(form.codes_of(*each) for each in experts.items())
        if has_gpu and dtype is not torch.bfloat16 and not are_codes:
            raise ConfigError(ON_A_GPU)
        if self._config.activation_dtype:
            codes = {form.codes_of(*each) for each in weight_shapes(model).items()}
            if not INTEGER_FORMATS & codes:
                raise rows_without_codes(self._config, ", ".join(sorted(codes - {""})))
        return form

    def _keeps_codes(self) -> bool:
        """Whether what files hold as codes stays so: unless that is asked for or forbidden, where
        kernels take them.
        """
        method = self._config.quantization
        if method is not None or self._hardware.gpu_bytes:
            return method in (None, "gguf")
        return self._has_own_products()

    def _has_own_products(self) -> bool:
        """Whether a CPU multiplies by kernels of our own: in float32, and in what it prefers."""
        has_them = not self._hardware.no_kernels
        return has_them and self._dtype in (torch.float32, self._hardware.auto_dtype)

    def forecast(self, context: int | None) -> Forecast:
        """The plan that reaches `context` tokens with the fewest settings (None: max_model_len, or
        the longest context). What was given of the memory's settings stays, and a max_model_len
        above `context` is reached, too. Raises OutOfMemoryError if not even a block of KV fits
        beside weights, or if what was given does not fit.
        """
        free, _ = self._memory.memory()
        if not free:
            raise OutOfMemoryError(f"{self._too_large()}; {self._smaller()}")
        try:
            longest = self._longest()
        except OutOfMemoryError as error:
            if self._given_memory():  # the error names what was given
                raise
            raise OutOfMemoryError(f"{self._too_large()}: {error}; {self._smaller()}") from error
        most = longest.plan.max_model_len
        wanted = max(filter(None, (context, self._config.max_model_len)), default=most)
        tokens = min(wanted, most)
        made = self._forecast(self._cheapest(tokens, longest), min(context or tokens, tokens))
        if made.context < most:
            at_most = self._forecast(self._cheapest(most, longest), most)
            made = replace(made, longest=at_most.context, longest_tokens_per_s=at_most.tokens_per_s)
        if wanted <= most:
            return made
        return replace(made, refusal=self._refusal(wanted, longest.plan))

    def _with(self, config: EngineConfig) -> Forecaster:
        return Forecaster(config, self._model, self._hardware, self._stored, self._guesser)

    def _given_memory(self) -> list[str]:
        """The settings of KV's memory that were given."""
        names = ("kv_cache_gib", "num_gpu_blocks", "kv_offload_gib")
        return [name for name in names if getattr(self._config, name) is not None]

    def _left_open(self, **planned: Any) -> dict[str, Any]:
        """Those of the planned settings that were not given."""
        given, default = self._config, EngineConfig(self._config.model)
        if given.num_gpu_blocks is not None:  # the other name of kv_cache_gib
            planned.pop("kv_cache_gib", None)
        return {
            name: value
            for name, value in planned.items()
            if getattr(given, name) == getattr(default, name)
        }

    def _too_large(self) -> str:
        """How the weights fill the memory."""
        hardware, whose = self._hardware, ""
        if self._ranks > 1:
            whose = " of a rank" if hardware.gpu_bytes else f" of {self._ranks} ranks"
        has = f"the {self._where()} has {in_gib(hardware.gpu_bytes or hardware.ram_bytes)}"
        if hardware.gpu_bytes:
            usable = max(0, hardware.gpu_bytes - self._reserved_bytes())
            has += f", of which {in_gib(usable)} are usable"
        return (
            f"the weights{whose} take {in_gib(self._weight_bytes)} in {self._held_in()}, {has}, "
            "and weights are not offloaded"
        )

    def _smaller(self) -> str:
        """What fits where these weights do not."""
        ways = []
        for method in ("gguf", "int8") if self._stored.is_gguf else ("int8",):
            config = replace(self._config, quantization=method)
            try:
                other = self._with(config)
                tokens = other._longest().plan.max_model_len
            except (ConfigError, OutOfMemoryError):
                continue
            loss = "lossy; " if method == "int8" else ""
            ways.append(f"--quantization {method} ({loss}{tokens:,} tokens fit)")
        few_bits = "a smaller model"
        if not self._has_4_bits():
            few_bits = "the model in 4 bits (GGUF, AWQ or GPTQ), or a smaller one"
        ways = ways or [few_bits]
        larger = f"a larger {self._where()} (--{self._where().lower()}-gib)"
        return "take " + ", or ".join([*ways, larger])

    def _where(self) -> str:
        return "GPU" if self._hardware.gpu_bytes else "RAM"

    def _longest(self) -> _Fit:
        """The fit with all memory for KV that there is."""
        if not self._hardware.gpu_bytes:
            planned = self._left_open(kv_cache_gib=self._room_gib())
            return self._fit(**planned, max_model_len=None)
        resident = self._try(max_model_len=None)
        if resident is not None and resident.plan.max_model_len == self._model.max_position:
            return resident
        host = _gib_down(self._hardware.ram_bytes)
        try:
            offloaded = self._offloaded(kv_offload_gib=host, max_model_len=None)
        except OutOfMemoryError:
            if resident is None:
                raise
            return resident  # the RAM is full
        both = [fit for fit in (resident, offloaded) if fit is not None]
        return max(both, key=lambda fit: fit.plan.max_model_len)

    def _cheapest(self, context: int, longest: _Fit) -> _Fit:
        """The fit with the fewest settings that holds `context` tokens, which `longest` holds."""
        asked = context if context < self._model.max_position else None
        plain = self._try(max_model_len=asked)
        if plain is not None and plain.plan.max_model_len == context:
            return plain
        kv = longest.plan.kv
        if not self._hardware.gpu_bytes:
            spare = max(1, self._config.decode_reserve_blocks)
            num_bytes = (-(-context // kv.block_size) + spare) * kv.block_bytes
            gib = min(gib_up(num_bytes * self._ranks), self._room_gib())
            return self._fit(max_model_len=asked, **self._left_open(kv_cache_gib=gib))
        num_bytes = kv.host_bytes_for(context) * self._ranks
        gib = min(gib_up(num_bytes), _gib_down(self._hardware.ram_bytes))
        return self._offloaded(max_model_len=asked, kv_offload_gib=gib)

    def _offloaded(self, **settings: Any) -> _Fit:
        """The fit with KV offload and, if it needs them, smaller steps and a smaller ring, or few
        requests at once, too.
        """
        settings |= {"enable_cpu_offload": True}
        gib = self._left_open(kv_offload_gib=settings.pop("kv_offload_gib"))
        for smaller in ({}, SMALL):
            fit = self._try(**settings, **gib, **self._left_open(**smaller))
            if fit is not None:
                return fit
        return self._fit(**settings, **gib, **self._left_open(**FEW))

    def _refusal(self, context: int, longest: MemoryPlan) -> str:
        """Why `context` tokens cannot be reached, and what would reach them."""
        if context > self._model.max_position:
            return (
                f"the model has {self._model.max_position:,} positions, {context:,} were asked "
                "for; take a model that was trained for more, or ask for less"
            )
        kv = longest.kv
        num_blocks = -(-context // kv.block_size)
        missing = (num_blocks - kv.capacity_blocks) * self._ranks
        gib = (self._hardware.ram_bytes + missing * kv.host_block_bytes) / GIB
        block_bytes = kv.block_bytes * self._ranks
        text = (
            f"the KV of {context:,} tokens takes {in_gib(num_blocks * block_bytes)}, and "
            f"{in_gib(kv.capacity_blocks * block_bytes)} are left for it; "
        )
        given = [name for name in self._given_memory() if name == "kv_offload_gib"]
        if not self._hardware.gpu_bytes:
            given = self._given_memory()
        if given:
            return f"{text}raise --{given[0].replace('_', '-')}, or leave it out"
        text += f"it fits with --ram-gib {math.ceil(gib)}"
        if self._hardware.gpu_bytes and self._config.kv_offload_dtype is None:
            config = replace(self._config, enable_cpu_offload=True, kv_offload_dtype="int8")
            halved: _Fit | None = None
            with suppress(OutOfMemoryError):  # the RAM holds no block
                halved = self._with(config)._longest()
            if halved is not None and halved.plan.max_model_len >= context:
                text += ", or with --enable-cpu-offload --kv-offload-dtype int8 (lossy)"
        return text

    def _forecast(self, fit: _Fit, tokens: int) -> Forecast:
        """tokens: of the request whose speed it tells."""
        computing, copying = self._step_seconds(fit.plan, tokens)
        speed = 1 / max(computing, copying)
        return Forecast(
            model=self._model,
            plan=fit.plan,
            settings=fit.settings,
            longest=fit.plan.max_model_len,
            longest_tokens_per_s=speed,
            context=tokens,
            tokens_per_s=speed,
            reserved_bytes=self._reserved_bytes(),
            weights=tuple(each.held for each in self._weights),
            whole_bytes=self._whole.held,
            held_in=self._held_in(),
            active_bytes=self._whole.active,
            is_link_bound=copying > computing,
        )

    def _reserved_bytes(self) -> int:
        """Of a GPU, what gpu_memory_utilization and CUDA's context keep."""
        if not self._hardware.gpu_bytes:
            return 0
        share = 1 - self._config.gpu_memory_utilization
        return int(share * self._hardware.gpu_bytes) + CUDA_CONTEXT_BYTES

    def _step_seconds(self, plan: MemoryPlan, context: int) -> tuple[float, float]:
        """Seconds in which a decode step of one request reads weights and KV, and in which it
        copies host KV; on a GPU both happen at once.
        """
        kv, model, hardware = plan.kv, self._part, self._hardware
        itemsize = self._dtype.itemsize
        num_layers = model.num_layers + model.has_mtp
        seen_bytes = sum(
            min(context, model.window(layer) or context) * math.prod(model.shape(layer).kv_heads)
            for layer in model.attention_layers
        )
        seen_bytes *= model.kv_parts * itemsize
        read = [each.read for each in self._weights]
        read_bytes = max(read)  # ranks wait for each other
        if not hardware.gpu_bytes:  # all read the same RAM
            read_bytes, seen_bytes = sum(read), seen_bytes * self._ranks
        read_s = read_bytes * self._held_share() / hardware.read_gb_per_s
        read_s += seen_bytes / (hardware.kv_gb_per_s or hardware.read_gb_per_s)
        held = min(kv.max_held_blocks, -(-context // kv.block_size))
        on_host = max(0, held - kv.num_blocks) if kv.num_host_blocks else 0
        copied = on_host * kv.streamed_bytes if kv.slot_blocks else 0
        reading = read_s / (1e9 * hardware.read_efficiency) + num_layers * hardware.layer_s
        return reading, copied / (hardware.link_gb_per_s * 1e9)

    def _held_share(self) -> float:
        """Of the bytes of weights: less than 1 where these are numbers that take fewer bits."""
        is_one = self._layers_in_codes() or self._dtype is not torch.bfloat16
        return 1.0 if is_one else self._hardware.held_share

    def _room_gib(self) -> float:
        """GiB of RAM that a CPU's KV may take beside weights and a step."""
        free, _ = self._memory.memory()
        plan = self._fit(max_model_len=None).plan
        return _gib_down((free - plan.activation_bytes - plan.kv.fixed_bytes) * self._ranks)

    def _try(self, **settings: Any) -> _Fit | None:
        """The fit with these settings; None if there is none."""
        try:
            return self._fit(**settings)
        except OutOfMemoryError:
            return None

    def _fit(self, **settings: Any) -> _Fit:
        """Raises OutOfMemoryError for settings that do not fit."""
        config = replace(self._config, **settings)
        in_c = self._hardware.name == "cpu" and not self._hardware.no_kernels
        held = self._weights[0].held
        draft = self._guesser.model if isinstance(self._guesser, DraftWeights) else None
        facts = ModelFacts("", self._dtype, "", held, "", in_c=in_c, draft=draft)
        of_a_rank = memory_settings_of_a_rank(config)
        return _Fit(config, plan_memory(of_a_rank, self._part, self._memory, facts, None))

    def _held_in(self) -> str:
        """As what weights are held."""
        form = self._form
        if form.keeps_codes and self._stored.is_gguf and self._stored.has_codes:
            return "codes of a GGUF"
        is_narrow = form.packs and form.forms.get(EMBEDDINGS) in NARROW
        held = torch.bfloat16 if is_narrow else self._dtype
        return str(held).removeprefix("torch.") + " and int8" * form.makes_codes

    def _has_4_bits(self) -> bool:
        """Whether weights of layers are held in about so many."""
        model, form = self._model, self._form
        each = layer_matrices(model)
        num_bytes = sum(form.bytes_of(name, shape, model) for name, shape in each.items())
        return num_bytes < FOUR_BITS * sum(map(math.prod, each.values()))

    def _layers_in_codes(self) -> bool:
        """Whether any matrix of a layer is codes."""
        return any(self._form.codes_of(*each) for each in layer_matrices(self._model).items())


def _kind(config: EngineConfig, hardware: Hardware) -> str:
    """Of the device, as torch calls it."""
    asked = config.device.partition(":")[0]
    return asked if hardware.gpu_bytes and asked != "auto" else hardware.name


def _gib_down(num_bytes: int) -> float:
    return max(1, math.floor(num_bytes / GIB * GIB_STEPS)) / GIB_STEPS
