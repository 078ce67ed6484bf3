"""Reads a model's generation_config.json as SamplingParams."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nanoengine.errors import CorruptModelError, InvalidParamsError
from nanoengine.sampling_params import SamplingParams
from nanoengine.text.checked_json import read_json_if_any

CHOOSING_KEYS = ("temperature", "top_k", "top_p", "min_p")
SAMPLING_KEYS = (*CHOOSING_KEYS, "repetition_penalty")


def read_sampling_params(folder: Path, unsaid: SamplingParams | None = None) -> SamplingParams:
    """SamplingParams with the SAMPLING_KEYS of generation_config.json in `folder`; missing keys and
    a missing file mean defaults. As in vLLM, `do_sample` is ignored.

    unsaid: the base where the file has none of CHOOSING_KEYS. A model that says one of them was
    tried with the defaults of the others.
    Raises CorruptModelError with the file if it is no JSON object or a value is out of range.
    """
    path = folder / "generation_config.json"
    values = read_json_if_any(path)
    given = {key: values[key] for key in SAMPLING_KEYS if values.get(key) is not None}
    base = SamplingParams()
    if unsaid is not None and given.keys().isdisjoint(CHOOSING_KEYS):
        base = unsaid
    try:
        return replace(base, **given)
    except InvalidParamsError as error:
        raise CorruptModelError(
            f'{path}: {error}; mend the file, or ignore it with generation_config="vllm"'
        ) from error
