"""Reads a model's generation_config.json as SamplingParams."""

from __future__ import annotations

from pathlib import Path

from nanoengine.errors import CorruptModelError, InvalidParamsError
from nanoengine.sampling_params import SamplingParams
from nanoengine.text.checked_json import read_json_if_any

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_sampling_params(folder: Path) -> SamplingParams:
    """SamplingParams with the SAMPLING_KEYS of generation_config.json in `folder`; missing keys and
    a missing file mean defaults. As in vLLM, `do_sample` is ignored.

    Raises CorruptModelError with the file if it is no JSON object or a value is out of range.
    """
    path = folder / "generation_config.json"
    values = read_json_if_any(path)
    given = {key: values[key] for key in SAMPLING_KEYS if values.get(key) is not None}
    try:
        return SamplingParams(**given)
    except InvalidParamsError as error:
        raise CorruptModelError(f"{path}: {error}") from error
