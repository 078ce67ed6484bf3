"""Generate: completions for the rows of a Ray dataset, by `dataset.map_batches(Generate, ...)`.

Imports no Ray: all it knows of it is that a batch is a dict of columns. docs/ray.md has a program.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from nanoengine.api.async_llm import AsyncLLM
from nanoengine.api.llm import LLM
from nanoengine.api.request_forms import OneParams, one_params
from nanoengine.config.engine import Settings, make_config, shows_settings
from nanoengine.errors import (
    ConfigError,
    InvalidParamsError,
    RequestError,
    ends_at_the_user,
    integer,
    shown,
)
from nanoengine.sampling_params import SamplingParams, seeded

EXACT_IN_A_FLOAT = 1 << 53


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a row gets. error: why it has no text, or "": Arrow gives a column of None no type."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "error"
    error: str = ""


class Generate:
    """A model that answers batches of rows; each actor of a pool makes one.

    `close()` ends it; an actor that ends does that, too.
    """

    @ends_at_the_user
    @shows_settings
    def __init__(
        self,
        model: str | Path,
        sampling_params: OneParams = None,
        *,
        prompt_column: str = "prompt",
        id_column: str = "id",
        seed_column: str | None = None,
        text_column: str = "text",
        token_ids_column: str = "token_ids",
        finish_reason_column: str = "finish_reason",
        error_column: str = "error",
        **settings: Unpack[Settings],
    ) -> None:
        """Load the model.

        model, settings: as for LLM. sampling_params: a SamplingParams or a dict of its fields, for
        all rows; None: the model's own.
        prompt_column: texts, token ids, conversations or prompt dicts, as for LLM.stream.
        id_column: a text or an integer for each row, and no two alike: a row without a seed gets
        one from its id and the setting `seed`, so its text depends on nothing else. The column of
        the prompts will do if they are texts. seed_column: seeds of rows; null: from the id.
        The other names are those of the new columns: the text, its token ids, why it ended
        ("stop", "length" or "error"), and the error of a row that could not be answered, else "".

        Raises ConfigError, InvalidParamsError and ModelLoadError.
        """
        self._given = [name for name in (prompt_column, id_column, seed_column) if name is not None]
        self._prompt, self._id, self._seed = prompt_column, id_column, seed_column
        self._made = text_column, token_ids_column, finish_reason_column, error_column
        names = [*dict.fromkeys(self._given), *self._made]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(
                f"two columns cannot both be {twice[0]!r}; name a new one by text_column, "
                "token_ids_column, finish_reason_column or error_column"
            )
        self._params = one_params(sampling_params)
        if self._params is not None and self._params.n != 1:
            raise InvalidParamsError(
                f"a row gets one text, and n is {self._params.n}; repeat the row under other ids"
            )
        self._engine_seed = make_config(model, settings).seed
        self._llm = AsyncLLM(model, **settings)

    async def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch's columns and the new ones. batch: {name: array of one value for each row}.

        A row whose prompt, id or seed is wrong has finish_reason "error" and says why in the error
        column; the others are answered. Calls may overlap.
        Raises ConfigError for columns that lack or would be overwritten, and the engine's error if
        the engine fails.
        """
        self._check(batch)
        params = self._params
        if params is None:
            params = await self._llm.call(_default_params)
        prompts, ids = list(batch[self._prompt]), list(batch[self._id])
        seeds = [None] * len(ids) if self._seed is None else list(batch[self._seed])
        rows = zip(prompts, ids, seeds, strict=True)
        answers = await asyncio.gather(*(self._answer(params, *row) for row in rows))
        columns = (
            [answer.text for answer in answers],
            [list(answer.token_ids) for answer in answers],
            [answer.finish_reason for answer in answers],
            [answer.error for answer in answers],
        )
        kept = {name: _kept(column) for name, column in batch.items()}
        return kept | dict(zip(self._made, columns, strict=True))

    def close(self) -> None:
        """End the engine and free its memory; closing twice is fine."""
        self._llm.close()

    def _check(self, batch: object) -> None:
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"a batch must be a dict of columns, got {type(batch).__name__}; leave "
                'batch_format of map_batches out, or say "numpy"'
            )
        there = list(batch)
        for name in self._given:
            if name not in batch:
                raise ConfigError(
                    f"the rows have no column {name!r}, only {shown(there)}; say prompt_column, "
                    "id_column or seed_column"
                )
        for name in self._made:
            if name in batch:
                raise ConfigError(
                    f"the rows have a column {name!r} already; name the new one by text_column, "
                    "token_ids_column, finish_reason_column or error_column"
                )

    async def _answer(self, params: SamplingParams, prompt: Any, row_id: Any, seed: Any) -> _Answer:
        try:
            asked = seeded(_with_seed(params, _plain(seed)), self._engine_seed, _name(row_id))
            async with await self._llm.stream(_plain(prompt), asked) as stream:
                output = (await stream.whole()).outputs[0]
        except RequestError as error:
            return _Answer(error=f"{type(error).__name__}: {error}")
        return _Answer(output.text, tuple(output.token_ids), str(output.finish_reason))


def _default_params(llm: LLM) -> SamplingParams:
    """What the engine takes for a request without parameters."""
    return llm.llm_engine.inputs.default_params


def _name(row_id: Any) -> str:
    """A row's id as text. Raises RequestError for other ids than texts and integers."""
    given = _plain(row_id)
    if isinstance(given, str):
        return given
    whole = integer(given)
    if whole is None:
        raise RequestError(f"the id of a row must be a text or an integer, got {shown(given)}")
    return str(whole)


def _with_seed(params: SamplingParams, seed: Any) -> SamplingParams:
    """The parameters with a row's seed, if it has one. Raises InvalidParamsError.

    A column of integers and nulls comes as floating numbers, null as NaN.
    """
    if seed is None or (isinstance(seed, float) and math.isnan(seed)):
        return params
    if isinstance(seed, float) and seed.is_integer() and abs(seed) <= EXACT_IN_A_FLOAT:
        seed = int(seed)
    return replace(params, seed=seed)


def _kept(column: Any) -> Any:
    """A column to give back. Arrow's lists come as arrays, and Ray takes arrays for tensors: a
    column would be lists in one file and tensors in the next.
    """
    if not isinstance(column, np.ndarray) or column.dtype != object:
        return column
    is_list = [isinstance(value, np.ndarray) and value.ndim == 1 for value in column]
    return [v.tolist() if listed else v for v, listed in zip(column, is_list, strict=True)]


def _plain(value: Any) -> Any:
    """A value of a column as Python's own: Arrow's lists come as arrays, at any depth, and its
    structs with None for each field that a row lacks.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value
