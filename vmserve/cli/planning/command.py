"""``vmserve plan``: print memory layouts and what fits, without loading a model."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vmserve.cli.planning.report import (
    PRESETS,
    ModelShape,
    block_size_report,
    block_size_table,
    plan_report,
    usual_lengths,
)
from vmserve.cli.planning.together import ModelNeed, TogetherReport
from vmserve.config import DEFAULT_BATCHED_TOKENS, GPU_BATCHED_TOKENS, EngineConfig
from vmserve.errors import ConfigurationError
from vmserve.memory.layout import CUDA_GRANULARITY, HOST_GRANULARITY
from vmserve.memory.limits import available_memory, max_map_count
from vmserve.numbers.sizes import format_size, parse_size

__all__ = ["plan_command"]

#: Columns of piped output: wide enough for every table.
_PIPED_WIDTH = 160


class PlanFormat(enum.StrEnum):
    table = "table"
    json = "json"


def plan_command(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=f"As serve takes it, or a published shape ({', '.join(PRESETS)}); NAME=PATH "
            "gives it a name. Several: also what they take together, and what is left. "
            "Default: the embedded model and all shapes."
        ),
    ] = None,
    granularity: Annotated[
        str | None,
        typer.Option(
            help="Bytes that pages are multiples of. Default: the host's 4KiB for the embedded "
            "model and directories, CUDA's 2MiB for the shapes."
        ),
    ] = None,
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="The pool's cap, e.g. 16GiB: says what fits in it.")
    ] = None,
    kv_page_size: Annotated[str | None, typer.Option(help="Fix the page of a group.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest request. Default: the model's context.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 16,
    tensor_parallel_size: Annotated[
        int,
        typer.Option("--tensor-parallel-size", "-tp", min=1, help="Ranks that share the heads."),
    ] = 1,
    dtype: Annotated[
        str | None, typer.Option(help="Type of the cache. Default: the model's own.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Lengths of requests, e.g. 200,8000: what each holds by kind of layers, and how "
            "much of it is wasted."
        ),
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="The block-size table of the vAttention paper instead.")
    ] = False,
    output_format: Annotated[PlanFormat, typer.Option("--format")] = PlanFormat.table,
) -> None:
    """Print how a model's KV cache can be laid out in pages, and what each way costs.

    Where layers are of several kinds (sliding windows, states): also what each kind takes. Of a
    model with weights: what an engine here would choose, or why it would refuse.
    """
    if paper:
        _print_paper_table(output_format)
        return
    lengths = _lengths(tokens)
    limit_bytes = _optional_size(kv_cache_memory, "kv_cache_memory")
    reports, needs = [], []
    chosen: dict[str, dict[str, Any]] = {}
    options = {
        "dtype": dtype,
        "kv_cache_memory": kv_cache_memory,
        "kv_page_size": kv_page_size,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "tensor_parallel_size": tensor_parallel_size,
    }
    for name in model or ["embedded", *PRESETS]:
        found = _find(name, dtype)
        size = parse_size(granularity, "granularity") if granularity else found.granularity
        chunk = GPU_BATCHED_TOKENS if size >= CUDA_GRANULARITY else DEFAULT_BATCHED_TOKENS
        report = plan_report(
            found.shape,
            granularity=size,
            limit_bytes=limit_bytes,
            max_len=max_model_len,
            tensor_parallel=tensor_parallel_size,
            block_tokens=block_size,
            max_map_count=(max_map_count() if size < CUDA_GRANULARITY else None),
            page_bytes=_optional_size(kv_page_size, "kv_page_size"),
            lengths=lengths,
            chunk_tokens=chunk,
        )
        reports.append(report)
        if found.source is not None:
            chosen[report.shape.name] = _choices(found.source, options)
        if report.longest is not None:
            needs.append(
                ModelNeed(
                    name=report.shape.name,
                    weight_bytes=found.weight_bytes,
                    kinds=report.pages,
                    longest=report.longest,
                )
            )
    together = None
    if model is not None and len(model) > 1 and len(needs) == len(reports):
        together = _together(needs, limit_bytes, lengths)
    if output_format is PlanFormat.json:
        described: object = [
            {**report.to_dict(), "engine": chosen.get(report.shape.name)} for report in reports
        ]
        if together is not None:
            described = {"models": described, "together": together.to_dict()}
        print(json.dumps(described, indent=2))
        return
    console = _console()
    for report in reports:
        console.print(report)
        if report.shape.name in chosen:
            console.print(_choices_table(chosen[report.shape.name]))
    if together is not None:
        console.print(together)


def _together(
    needs: list[ModelNeed], limit_bytes: int | None, lengths: list[int]
) -> TogetherReport:
    """Raises :class:`ConfigurationError` for a name given twice, and for models that do not fit."""
    names = [need.name for need in needs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(
            f"model: two models are called {twice[0]}: give one another name, as in NAME=PATH"
        )
    free_bytes, whose = available_memory()
    shortest = min(need.longest.max_len for need in needs)
    report = TogetherReport(
        models=tuple(needs),
        lengths=tuple(lengths) or usual_lengths(shortest),
        limit_bytes=limit_bytes,
        free_bytes=free_bytes,
        whose=whose,
    )
    report.require_room()
    return report


def _print_paper_table(output_format: PlanFormat) -> None:
    shapes = [PRESETS[name] for name in ("yi-6b", "llama-3-8b", "yi-34b")]
    rows = block_size_table(shapes)
    if output_format is PlanFormat.json:
        names = rows[0].__dataclass_fields__
        print(json.dumps([{name: getattr(row, name) for name in names} for row in rows], indent=2))
        return
    _console().print(block_size_report(rows))


@dataclasses.dataclass(frozen=True)
class _Found:
    """A model, the granularity of the device that usually serves it, and the size of its files.

    ``source``: where its weights are, of a model that has some.
    """

    shape: ModelShape
    granularity: int
    weight_bytes: int | None = None
    source: str | None = None


def _find(given: str, dtype: str | None) -> _Found:
    preset = PRESETS.get(given.lower())
    if preset is not None:
        return _Found(_with_dtype(preset, dtype), CUDA_GRANULARITY)
    # Imported here since the presets need no model configuration.
    from vmserve.models.config import ModelConfig  # noqa: PLC0415
    from vmserve.models.hub import resolve_model  # noqa: PLC0415
    from vmserve.models.loader import stored_bytes  # noqa: PLC0415

    name, _, source = given.rpartition("=") if not Path(given).exists() else ("", "", given)
    path = resolve_model(source)
    config = ModelConfig.from_directory(path)
    shape = ModelShape(
        name=name or source,
        num_layers=config.num_layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=str(config.dtype).removeprefix("torch."),
        max_len=config.max_position_embeddings,
        windows=config.windows,
        keys_only=config.keys_only,
        num_states=config.num_states,
        state_bytes=config.state_bytes // max(1, config.num_states),
    )
    num_bytes = stored_bytes(path, config.native_only)
    return _Found(_with_dtype(shape, dtype), HOST_GRANULARITY, num_bytes, source)


def _choices(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine here would be with these options; under "refused" why there would be none."""
    from vmserve.engine.choose import choices_for  # noqa: PLC0415 - presets need no engine

    given = {name: value for name, value in options.items() if value is not None}
    try:
        return choices_for(EngineConfig(model=source, **given)).to_dict()
    except ConfigurationError as error:
        return {"refused": str(error)}


def _choices_table(chosen: Mapping[str, Any]) -> Table:
    table = Table(title="an engine here", title_justify="left", show_header=False)
    for name, value in chosen.items():
        if name.endswith("_bytes"):
            shown = format_size(value) if value else "none"
        elif isinstance(value, dict):
            shown = ", ".join(f"{key}: {each}" for key, each in value.items())
        elif isinstance(value, bool):
            shown = "yes" if value else "no"
        else:
            shown = str(value)
        table.add_row(name.removesuffix("_bytes").replace("_", " "), shown)
    return table


def _lengths(tokens: str | None) -> list[int]:
    """Raises :class:`ConfigurationError` for what are no lengths."""
    try:
        lengths = [int(length) for length in tokens.split(",")] if tokens is not None else []
    except ValueError:
        lengths = [0]
    if any(length < 1 for length in lengths):
        raise ConfigurationError(f"tokens: {tokens!r} are no lengths; write e.g. 200,8000")
    return lengths


def _with_dtype(shape: ModelShape, dtype: str | None) -> ModelShape:
    return shape if dtype is None else dataclasses.replace(shape, dtype=dtype)


def _optional_size(value: str | None, name: str) -> int | None:
    if value is None:
        return None
    size = parse_size(value, name)
    if size == 0:
        raise ConfigurationError(f"{name}: 0 holds nothing; give a size such as 4GiB")
    return size


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)
