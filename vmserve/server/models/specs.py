"""What the operator says of each model: on the command line, in a file, or to the admin route."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from vmserve.config import EngineConfig
from vmserve.errors import ConfigurationError
from vmserve.numbers.sizes import parse_size
from vmserve.options import Bounds, Option, check_options, declared_options, read_text, rules
from vmserve.server.config import API, ServerConfig
from vmserve.server.models.prefixes import read_prefixes

__all__ = ["ModelSpec", "model_specs", "spec_of"]

_KV: Final = "KV cache"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One of several models. ``engine``: options of :class:`~vmserve.config.EngineConfig`;
    ``http``: those of the server that a model may have for itself.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """

    name: str
    engine: Mapping[str, Any]
    http: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: Texts of prefixes that are pinned, by file.
    prefixes: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    weight: Annotated[
        float,
        Option(
            "Share of the KV cache's memory under pressure, relative to the other models'.",
            _KV,
            Bounds(0, 1e6, open_low=True),
        ),
    ] = 1.0
    kv_floor: Annotated[
        int | str | None,
        Option(
            "KV cache memory that no other model can take.",
            _KV,
            default="what one sequence of the whole context needs",
            metavar="SIZE",
        ),
    ] = None
    kv_cap: Annotated[
        int | str | None,
        Option("Most KV cache memory.", _KV, default="all of --kv-cache-memory", metavar="SIZE"),
    ] = None
    preload: Annotated[
        bool, Option("Load at the start of the server, not at the first request.", API)
    ] = True

    def __post_init__(self) -> None:
        check_options(self)
        if not self.name or not self.name.isprintable():
            raise ConfigurationError(f"{self.name!r} is no name of a model: give printable text")
        for option in ("kv_floor", "kv_cap"):
            size = getattr(self, option)
            if size is not None:
                parse_size(size, option)
        EngineConfig.from_options(dict(self.engine))

    @property
    def model(self) -> str | None:
        """What is loaded: as ``--model`` has it."""
        return self.engine.get("model")

    def config(self, server: ServerConfig) -> ServerConfig:
        """The server's options as they are for this model."""
        return dataclasses.replace(server, served_model_names=(self.name,), **self.http)


#: Options that a model has besides those of its engine.
_OWN: Final = declared_options(ModelSpec)
#: Options of the server that each model may have for itself.
_HTTP: Final = ("chat_template", "tool_call_parser", "reasoning_parser", "idle_unload")
_PINS: Final = "pin_prefix"


def model_specs(
    given: Iterable[tuple[str, str]], file: Path | None, shared: Mapping[str, Any]
) -> list[ModelSpec]:
    """Make the specifications of models, ``given`` by name and model, and of a TOML ``file``.

    ``shared``: see :func:`spec_of`.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """
    tables: list[tuple[str, dict[str, Any]]] = [(name, {"model": model}) for name, model in given]
    if file is not None:
        tables += read_models_file(file).items()
    return [spec_of(name, table, shared) for name, table in tables]


def spec_of(
    name: str, table: Mapping[str, Any], shared: Mapping[str, Any] | None = None
) -> ModelSpec:
    """Make the specification of a model from a table of options.

    ``shared``: options of the engine that it has unless the table says otherwise.

    Raises :class:`~vmserve.errors.ConfigurationError`, which names the model.
    """
    own = {key: value for key, value in table.items() if key in _OWN}
    http = {key: value for key, value in table.items() if key in _HTTP}
    engine = {key: value for key, value in table.items() if key not in {*own, *http, _PINS}}
    try:
        has_memory = "kv_cache_memory" in engine
        rules.check({"are_several": True, "table_kv_cache_memory": has_memory})
        if (template := http.get("chat_template")) is not None:
            http["chat_template"] = read_text(Path(str(template)), "chat_template")
        ServerConfig(served_model_names=(name,), **http)
        return ModelSpec(
            name=name,
            engine={**(shared or {}), "model": name, **engine},
            http=http,
            prefixes=read_prefixes(_paths(table.get(_PINS, ()))),
            **own,
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"model {name}: {error}") from error


def _paths(given: object) -> list[Path]:
    """One file, or several."""
    paths = [given] if isinstance(given, str) else given
    if not isinstance(paths, list | tuple) or not all(isinstance(each, str) for each in paths):
        raise ConfigurationError(f"{_PINS}: {given!r} is not a file or a list of files")
    return [Path(each) for each in paths]


def read_models_file(path: Path) -> dict[str, dict[str, Any]]:
    """Read the ``[models.NAME]`` tables of a TOML file.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """
    import tomllib  # noqa: PLC0415 - most servers have no such file

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"models_config: cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"models_config: {path} is not TOML: {error}") from error
    tables = document.pop("models", None)
    if document or not isinstance(tables, dict) or not tables:
        raise ConfigurationError(
            f"models_config: {path} must have tables [models.NAME] and nothing else"
            + (f", and has {', '.join(document)}" if document else "")
        )
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigurationError(f"models_config: {name} in {path} must be a table")
    return tables
