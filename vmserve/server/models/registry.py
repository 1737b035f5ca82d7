"""The server's models by name."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterable, Iterator

from vmserve.errors import ConfigurationError
from vmserve.server.errors import ApiError
from vmserve.server.models.served import ServedModel

__all__ = ["Models"]

logger = logging.getLogger(__name__)


class Models:
    """All models of a server, in order; requests that name none go to the first.

    ``are_several``: there is a pool of memory for more than one.

    Raises :class:`~vmserve.errors.ConfigurationError` for two models of one name.
    """

    def __init__(self, served: Iterable[ServedModel], are_several: bool = False) -> None:
        self.are_several = are_several
        self._served: list[ServedModel] = []
        self._by_name: dict[str, ServedModel] = {}
        self._over = asyncio.Event()
        for model in served:
            self._insert(model)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served)

    def __len__(self) -> int:
        return len(self._served)

    @property
    def default(self) -> ServedModel:
        return self._served[0]

    @property
    def names(self) -> list[str]:
        """All names that requests may give."""
        return list(self._by_name)

    @property
    def have_states(self) -> bool:
        """Whether there is more to tell of a model than that it is served."""
        return self.are_several or self.default.config.idle_unload is not None

    def find(self, name: str | None) -> ServedModel:
        """Return the model of a request. Raises :class:`ApiError` 404 for an unknown name."""
        if name is None:
            return self.default
        try:
            return self._by_name[name]
        except KeyError:
            message = f"The model `{name[:200]}` does not exist."
            raise ApiError(404, message, "model") from None

    def _insert(self, model: ServedModel) -> None:
        for name in model.config.served_model_names:
            if name in self._by_name:
                raise ConfigurationError(
                    f"two models have the name {name!r}: name one of them, as --model NAME={name}"
                )
        model.on_death = functools.partial(self._mourn, model)
        self._served.append(model)
        self._by_name |= dict.fromkeys(model.config.served_model_names, model)

    # -- the life of all --------------------------------------------------------------

    @property
    def errored(self) -> bool:
        """Whether the engines of all models have died."""
        return all(model.is_dead for model in self._served)

    async def until_dead(self) -> None:
        """Watch all, and return when the only model there is has died and is not started again.

        Of several models, one that has died fails its requests, and the others go on.
        """
        for model in self._served:
            model.begin()
        await self._over.wait()

    async def shutdown(self) -> None:
        """Abort what runs, and end all engines."""
        await asyncio.gather(*(model.leave(0.0) for model in self._served))

    def _mourn(self, model: ServedModel) -> None:
        if self._served == [model]:
            self._over.set()
        else:
            logger.error("the engine of %s is dead: its requests are answered 503", model.name)
