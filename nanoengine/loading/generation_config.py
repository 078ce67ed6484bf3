"""How a model wants to be sampled: generation_config.json as SamplingParams."""

from __future__ import annotations

from pathlib import Path

from nanoengine.errors import CorruptModelError, InvalidParamsError
from nanoengine.sampling_params import SamplingParams
from nanoengine.text.checked_json import read_json_if_any

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_sampling_params(folder: Path) -> SamplingParams:
    """SamplingParams with what generation_config.json in `folder` says of SAMPLING_KEYS; its own
    defaults for the rest, and where there is no such file. As in vLLM, `do_sample` is not asked.

    Raises CorruptModelError, naming the file, when it is no JSON object or a value is out of range.
    """
    path = folder / "generation_config.json"
    values = read_json_if_any(path)
    given = {key: values[key] for key in SAMPLING_KEYS if values.get(key) is not None}
    try:
        return SamplingParams(**given)
    except InvalidParamsError as error:
        raise CorruptModelError(f"{path}: {error}") from error
