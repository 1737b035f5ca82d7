"""A class for ``ray.data.Dataset.map_batches``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vmserve.client.llm import LLM
from vmserve.errors import ConfigurationError, InvalidRequestError
from vmserve.sampling.params import SamplingParams

if TYPE_CHECKING:
    from vmserve.types import RequestOutput

__all__ = ["Predictor"]


class Predictor:
    """Answers the prompts or conversations of a dataset, with a model of its own in each actor.

        answers = dataset.map_batches(
            Predictor,
            fn_constructor_kwargs={"model": "smollm2", "sampling_params": {"max_tokens": 64}},
            concurrency=4, num_cpus=2, batch_size=256,
        )

    Rows have a ``prompt`` (text) or ``messages`` (a conversation); the columns' names are options.
    Added are ``generated_text``, ``finish_reason``, ``num_prompt_tokens``,
    ``num_generated_tokens``, and ``error``: why a row cannot be served, else empty. Such a row does
    not end the work.

    ``sampling_params``: those of all rows; by default the model's own. ``engine_options``: as
    :class:`vmserve.LLM` takes them. A batch should have several times as many rows as sequences
    run at once (``max_num_seqs``), because the last rows of each batch run alone.

    Raises :class:`~vmserve.errors.ConfigurationError` in the actor.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        prompt_column: str = "prompt",
        messages_column: str = "messages",
        **engine_options: Any,
    ) -> None:
        self._prompt_column = prompt_column
        self._messages_column = messages_column
        if isinstance(sampling_params, Mapping):
            sampling_params = SamplingParams(**sampling_params)
        self._params = sampling_params
        self._llm = LLM(model, **engine_options)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the rows of a batch of columns; returns it with more columns.

        Raises :class:`~vmserve.errors.ConfigurationError` if neither column is there, or both are.
        """
        is_chat = self._messages_column in batch
        if is_chat == (self._prompt_column in batch):
            raise ConfigurationError(
                f"a dataset needs a column {self._prompt_column!r} or {self._messages_column!r}, "
                f"and not both; it has {', '.join(batch)}"
            )
        column = self._messages_column if is_chat else self._prompt_column
        answers = self._answer([_plain(row) for row in batch[column]], is_chat)
        outputs = [None if isinstance(each, str) else each for each in answers]
        texts = ["" if each is None else each.outputs[0].text for each in outputs]
        reasons = ["" if each is None else each.outputs[0].finish_reason or "" for each in outputs]
        return {
            **batch,
            "generated_text": np.array(texts, dtype=object),
            "finish_reason": np.array(reasons, dtype=object),
            "num_prompt_tokens": np.array(
                [0 if each is None else len(each.prompt_token_ids) for each in outputs]
            ),
            "num_generated_tokens": np.array(
                [0 if each is None else len(each.outputs[0].token_ids) for each in outputs]
            ),
            "error": np.array(
                [each if isinstance(each, str) else "" for each in answers], dtype=object
            ),
        }

    def _answer(self, rows: Sequence[Any], is_chat: bool) -> list[RequestOutput | str]:
        """Returns an output or an error for each row.

        Nothing is computed of a call with a bad row: its halves are tried by themselves.
        """
        if not rows:
            return []
        try:
            if is_chat:
                return list(self._llm.chat(rows, self._params))
            return list(self._llm.generate(rows, self._params))
        except InvalidRequestError as error:
            if len(rows) == 1:
                return [str(error)]
        middle = len(rows) // 2
        return self._answer(rows[:middle], is_chat) + self._answer(rows[middle:], is_chat)


def _plain(value: Any) -> Any:
    """Make lists of the arrays that Ray gives for nested columns, and leave out missing fields."""
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    return value
