"""``vmserve plan``: print memory layouts and what fits, without loading a model."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from vmserve.errors import ConfigurationError
from vmserve.memory.layout import CUDA_GRANULARITY, HOST_GRANULARITY
from vmserve.memory.limits import max_map_count
from vmserve.memory.plan_report import (
    PRESETS,
    ModelShape,
    block_size_report,
    block_size_table,
    plan_report,
)
from vmserve.sizes import parse_size

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
            help=f"As serve takes it, or a published shape ({', '.join(PRESETS)}); repeatable. "
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

    Where layers are of several kinds (sliding windows, states): also what each kind takes.
    """
    if paper:
        _print_paper_table(output_format)
        return
    lengths = _lengths(tokens)
    reports = []
    for name in model or ["embedded", *PRESETS]:
        shape, default_granularity = _shape(name, dtype)
        size = parse_size(granularity, "granularity") if granularity else default_granularity
        reports.append(
            plan_report(
                shape,
                granularity=size,
                limit_bytes=_optional_size(kv_cache_memory, "kv_cache_memory"),
                max_len=max_model_len,
                tensor_parallel=tensor_parallel_size,
                block_tokens=block_size,
                max_map_count=(max_map_count() if size < CUDA_GRANULARITY else None),
                page_bytes=_optional_size(kv_page_size, "kv_page_size"),
                lengths=lengths,
            )
        )
    if output_format is PlanFormat.json:
        print(json.dumps([report.to_dict() for report in reports], indent=2))
        return
    console = _console()
    for report in reports:
        console.print(report)


def _print_paper_table(output_format: PlanFormat) -> None:
    shapes = [PRESETS[name] for name in ("yi-6b", "llama-3-8b", "yi-34b")]
    rows = block_size_table(shapes)
    if output_format is PlanFormat.json:
        names = rows[0].__dataclass_fields__
        print(json.dumps([{name: getattr(row, name) for name in names} for row in rows], indent=2))
        return
    _console().print(block_size_report(rows))


def _shape(name: str, dtype: str | None) -> tuple[ModelShape, int]:
    """Shape of a model, and page granularity of the device that usually serves it."""
    preset = PRESETS.get(name.lower())
    if preset is not None:
        return _with_dtype(preset, dtype), CUDA_GRANULARITY
    # Imported here since the presets need no model configuration.
    from vmserve.models.config import ModelConfig  # noqa: PLC0415
    from vmserve.models.hub import resolve_model  # noqa: PLC0415

    config = ModelConfig.from_directory(resolve_model(None if name == "embedded" else name))
    shape = ModelShape(
        name=name,
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
    return _with_dtype(shape, dtype), HOST_GRANULARITY


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
