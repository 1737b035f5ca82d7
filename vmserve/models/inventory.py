"""List the models that are at hand, without loading any."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from vmserve.errors import ConfigurationError, VmserveError
from vmserve.models.config import ModelConfig
from vmserve.models.families import FAMILIES
from vmserve.models.gguf.reader import GgufModel, is_gguf
from vmserve.models.hub import EMBEDDED_NAME, resolve_model
from vmserve.models.hub_download import cached_snapshots
from vmserve.models.loader import stored_bytes, weight_files
from vmserve.models.pullable import PULLABLE, PullableModel, find_pulled, kept_directory
from vmserve.system.files import read_json

__all__ = ["ListedModel", "list_models"]

#: Names of second and later parts of a split file, which come with the first.
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, kw_only=True)
class ListedModel:
    #: Name that ``--model`` takes.
    model: str
    #: "to pull": it is not here. "unchecked": ``transformers`` decides at start; asking it is slow.
    status: Literal["ready", "to pull", "unchecked", "unusable"]
    source: Literal["embedded", "pulled", "installed", "package index", "hub cache"]
    #: The type of most weights in the files, or the method that quantized them.
    weights: str = ""
    context: int | None = None
    #: Bytes of the files with weights.
    bytes: int | None = None
    path: str | None = None
    #: Reason why it cannot be used as it is, and the remedy.
    note: str = ""


def list_models() -> Iterator[ListedModel]:
    """Yield the embedded model, those that can be pulled, and those of the Hugging Face cache.

    Entries that are damaged or not supported have the reason in their note.
    """
    yield _listed(EMBEDDED_NAME, "embedded", resolve_model(None))
    for model in PULLABLE.values():
        yield _pullable(model)
    for repo_id, snapshot in cached_snapshots():
        yield from _of_repository(repo_id, snapshot)


def _pullable(model: PullableModel) -> ListedModel:
    path = find_pulled(model)
    if path is None:
        return ListedModel(
            model=model.name,
            status="to pull",
            source="package index",
            bytes=model.num_bytes,
            note=f"fetch it with `vmserve pull {model.name}`",
        )
    kept = kept_directory(model) in path.parents
    return _listed(model.name, "pulled" if kept else "installed", path)


def _of_repository(repo_id: str, snapshot: Path | None) -> Iterator[ListedModel]:
    if snapshot is None:
        yield ListedModel(
            model=repo_id,
            status="unusable",
            source="hub cache",
            note=f"it was not fetched, or cannot be read: run `hf download {repo_id}`",
        )
        return
    files = sorted(snapshot.glob("**/*.gguf"))
    for file in files:
        if not _LATER_PART.search(file.name):
            yield _listed(f"{repo_id}:{file.relative_to(snapshot)}", "hub cache", file)
    if not files or any(snapshot.glob("config.json")):
        yield _listed(repo_id, "hub cache", snapshot)


def _listed(
    name: str, source: Literal["embedded", "pulled", "installed", "hub cache"], path: Path
) -> ListedModel:
    try:
        facts = _of_file(path) if is_gguf(path) else _of_directory(path)
    except (VmserveError, OSError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        facts = {"status": "unusable", "note": " ".join(reason.split())}
    return ListedModel(model=name, source=source, path=str(path), **facts)


def _of_file(path: Path) -> dict[str, Any]:
    config = ModelConfig.from_directory(path)
    model = config.native_only
    assert isinstance(model, GgufModel)
    return {
        "status": "ready",
        "weights": _most((each.type.name, each.num_bytes) for _, each in model.tensors.values()),
        "context": config.max_position_embeddings,
        "bytes": stored_bytes(path, config.native_only),
    }


def _of_directory(directory: Path) -> dict[str, Any]:
    if not (directory / "config.json").is_file():
        raise ConfigurationError("it has no config.json with *.safetensors beside it, and no GGUF")
    raw = read_json(directory / "config.json")
    files = weight_files(directory)
    facts = {
        "status": "ready",
        "weights": _quantization(raw) or _stored_type(files[0]),
        "context": raw.get("max_position_embeddings"),
        "bytes": sum(file.stat().st_size for file in files),
    }
    names = raw.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else raw.get("model_type")
    family = FAMILIES.get(str(architecture))
    if family is None or family.read(raw) is None:  # else nothing below imports transformers
        note = f"{architecture} runs through transformers, if at all: a start tells"
        return {**facts, "status": "unchecked", "note": note}
    config = ModelConfig.from_directory(directory)
    return {**facts, "context": config.max_position_embeddings}


def _quantization(raw: dict[str, Any]) -> str | None:
    described = raw.get("quantization_config")
    return str(described.get("quant_method")) if isinstance(described, dict) else None


def _stored_type(path: Path) -> str:
    try:
        with safe_open(path, "np") as file:
            tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118 - no mapping
            return _most((each.get_dtype(), math.prod(each.get_shape())) for each in tensors)
    except (SafetensorError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path.name} is damaged ({error}): fetch it again") from error


def _most(sizes: Iterable[tuple[str, int]]) -> str:
    """Return the name with the largest sum; of an empty file none."""
    sums: Counter[str] = Counter()
    for name, size in sizes:
        sums[name] += size
    return max(sums, key=sums.__getitem__, default="")
