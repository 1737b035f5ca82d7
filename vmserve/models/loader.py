"""Find the weights of a model directory: their files and places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from vmserve.errors import ConfigurationError
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.gguf.reader import GgufModel
from vmserve.models.plan import canonical_name, is_ignorable, tensor_shapes
from vmserve.models.safetensors_file import SafetensorsFile, StoredTensor
from vmserve.system.files import read_json

__all__ = ["Progress", "choose_tensors", "find_tensors", "listed", "stored_bytes", "weight_files"]

#: ``progress(phase, done_bytes, total_bytes)``, called after each tensor.
Progress = Callable[[str, int, int], None]

_INDEX = "model.safetensors.index.json"
_NAMED_IN_ERRORS = 4


def find_tensors(
    directory: Path, config: DecoderConfig
) -> dict[str, tuple[SafetensorsFile, StoredTensor]]:
    """Find exactly the decoder's tensors, in the order of its shapes.

    Raises :class:`~vmserve.errors.ConfigurationError` for missing or damaged files and for
    tensors that are missing, surplus or of the wrong shape, and names them.
    """
    shapes = tensor_shapes(config)
    stored: dict[str, tuple[SafetensorsFile, StoredTensor]] = {}
    for path in weight_files(directory):
        file = SafetensorsFile(path)
        for name, tensor in file.tensors.items():
            stored[canonical_name(config, shapes, name)] = file, tensor
    return choose_tensors(stored, shapes, config)


def choose_tensors(
    stored: Mapping[str, tuple[SafetensorsFile, StoredTensor]],
    shapes: Mapping[str, tuple[int, ...]],
    config: DecoderConfig,
) -> dict[str, tuple[SafetensorsFile, StoredTensor]]:
    """The tensors of ``stored`` that ``shapes`` has; see :func:`find_tensors`."""
    present, wanted = set(stored), set(shapes)
    missing = sorted(wanted - present)
    if missing:
        raise ConfigurationError(
            f"the checkpoint lacks {len(missing)} tensors that config.json implies: "
            f"{listed(missing)}; fetch the model again"
        )
    surplus = sorted(name for name in present - wanted if not is_ignorable(config, name))
    if surplus:
        raise ConfigurationError(
            f"the checkpoint has {len(surplus)} tensors that config.json does not imply: "
            f"{listed(surplus)}; config.json and the weights do not belong together"
        )
    for name, shape in shapes.items():
        file, tensor = stored[name]
        if tensor.shape != shape:
            raise ConfigurationError(
                f"{file.path.name}: tensor {name} has shape {list(tensor.shape)}, but config.json "
                f"implies {list(shape)}: the files do not belong together, fetch the model again"
            )
    return {name: stored[name] for name in shapes}


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights; raises as :func:`find_tensors` does if there are none."""
    if (directory / _INDEX).is_file():
        return _indexed_files(directory)
    single = directory / "model.safetensors"
    candidates = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if len(candidates) == 1:
        return candidates
    if candidates:
        raise ConfigurationError(
            f"{directory} has {len(candidates)} *.safetensors files but no {_INDEX} that says "
            "which to use: fetch the model again"
        )
    if any(directory.glob("*.bin")):
        raise ConfigurationError(
            f"{directory} has its weights in *.bin files, which are never read (they can run "
            "code): convert them with save_pretrained(..., safe_serialization=True)"
        )
    raise ConfigurationError(
        f"{directory} has no *.safetensors files: --model needs the weights beside config.json"
    )


def stored_bytes(path: Path, opened: object) -> int:
    """The size of a model's files with weights, those that are there.

    ``opened``: ``ModelConfig.native_only``, which may be a GGUF model. Raises as
    :func:`find_tensors` does if there are none.
    """
    if isinstance(opened, GgufModel):
        files = [file.path for file in opened.files]
    else:
        files = weight_files(path)
    return sum(file.stat().st_size for file in files if file.is_file())


def _indexed_files(directory: Path) -> list[Path]:
    weight_map = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigurationError(f"{_INDEX} has no weight_map: fetch the model again")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ConfigurationError(f"{_INDEX} names files outside its directory: {listed(outside)}")
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise ConfigurationError(
            f"{len(absent)} of the {len(names)} files in {_INDEX} are missing: {listed(absent)}; "
            "fetch the model again"
        )
    return [directory / name for name in names]


def listed(names: list[str]) -> str:
    """Format the first few names and the number of the others."""
    more = len(names) - _NAMED_IN_ERRORS
    return ", ".join(names[:_NAMED_IN_ERRORS]) + (f" and {more} more" if more > 0 else "")
