"""The server's models by name."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from vmserve.client.lending import KVPool
from vmserve.errors import ConfigurationError, InvalidRequestError
from vmserve.options import rules
from vmserve.server.errors import ApiError
from vmserve.server.models.served import ServedModel

__all__ = ["Models", "Share"]

logger = logging.getLogger(__name__)

Make = Callable[[str, Mapping[str, Any]], ServedModel]
#: Turns the memory of the only model into a pool that others can share, and returns what makes
#: these.
Share = Callable[[ServedModel], Awaitable[tuple[Make, KVPool]]]


class Models:
    """All models of a server, in order; requests that name none go to the first.

    ``make`` makes a model of a name and a table of options, as ``--models-config`` has them, and
    ``pool`` is what their KV caches share. A server of one model has neither until a second one is
    added: then ``share`` makes them. Without any of these none can be added.

    Raises :class:`~vmserve.errors.ConfigurationError` for two models of one name.
    """

    def __init__(
        self,
        served: Iterable[ServedModel],
        make: Make | None = None,
        pool: KVPool | None = None,
        share: Share | None = None,
    ) -> None:
        self.pool = pool
        self._make = make
        self._share = share
        self._sharing = asyncio.Lock()
        self._leaving: list[ServedModel] = []
        self._served: list[ServedModel] = []
        self._by_name: dict[str, ServedModel] = {}
        self._over = asyncio.Event()
        for model in served:
            self._insert(model)

    def __iter__(self) -> Iterator[ServedModel]:
        """All, with those that are being removed."""
        return iter([*self._served, *self._leaving])

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
        """Whether there is more to report of a model than that it is served."""
        several = self._make is not None or len(self._served) > 1
        return several or self.default.config.idle_unload is not None

    def find(self, name: str | None) -> ServedModel:
        """Return the model of a request. Raises :class:`ApiError` 404 for an unknown name."""
        if name is None:
            return self.default
        try:
            return self._by_name[name]
        except KeyError:
            message = f"The model `{name[:200]}` does not exist."
            raise ApiError(404, message, "model", code="model_not_found") from None

    def _insert(self, model: ServedModel) -> None:
        leaving = {name for each in self._leaving for name in each.config.served_model_names}
        for name in model.config.served_model_names:
            if name in leaving:
                raise ConfigurationError(f"a model {name!r} is still being removed: try again")
            if name in self._by_name:
                raise ConfigurationError(
                    f"two models have the name {name!r}: name one of them, as --model NAME={name}"
                )
        model.on_death = functools.partial(self._mourn, model)
        self._served.append(model)
        self._by_name |= dict.fromkeys(model.config.served_model_names, model)

    # -- changes while serving --------------------------------------------------------

    async def add(self, name: str, table: Mapping[str, Any]) -> ServedModel:
        """Serve another model, and load it unless ``preload`` in ``table`` is false.

        Raises :class:`~vmserve.errors.ConfigurationError`, and what loading raises; then it is not
        served.
        """
        model = (await self._maker())(name, table)
        self._insert(model)
        if table.get("preload", True):
            try:
                await model.load()
            except BaseException:
                await self._drop(model, 0.0)
                raise
        return model

    async def _maker(self) -> Make:
        async with self._sharing:
            if self._make is None:
                rules.check({"added_model": True, "unshared_memory": self._share is None})
                assert self._share is not None
                self._make, self.pool = await self._share(self.default)
        return self._make

    async def remove(self, name: str, timeout: float) -> ServedModel:
        """Serve a model no longer; requests that it has already get ``timeout`` seconds.

        Raises :class:`ApiError` 404, and :class:`~vmserve.errors.InvalidRequestError` for the last.
        """
        model = self.find(name)
        if len(self._served) == 1:
            raise InvalidRequestError("This is the only model: stop the server instead", "model")
        await self._drop(model, timeout)
        return model

    async def _drop(self, model: ServedModel, timeout: float) -> None:
        self._served.remove(model)
        for name in model.config.served_model_names:
            del self._by_name[name]
        self._leaving.append(model)
        try:
            await model.leave(timeout)
        finally:
            self._leaving.remove(model)

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
        await asyncio.gather(*(model.leave(0.0) for model in self))

    def _mourn(self, model: ServedModel) -> None:
        if self._served == [model]:
            self._over.set()
        else:
            logger.error("the engine of %s is dead: its requests are answered 503", model.name)
