"""Checkpoints and their conversions, made once and kept in the cache directory."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from environments import NotInstalledError, Say, ensure_packages, run
from model_shape import SHAPES, LlamaShape
from subjects import Subject

HERE = Path(__file__).resolve().parent
#: By the name that ``--models`` takes: the shape.
MODELS = {"8m": "8m", "125m": "125m-long", "1b": "1b"}


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint in Hugging Face layout, bfloat16, with seeded random weights."""

    name: str
    shape: LlamaShape
    directory: Path


def ensure_model(name: str, seed: int, cache_dir: Path, log: Path) -> Model:
    """Another process writes it: were torch loaded here too, its pages would count half in
    the workers' proportional memory.
    """
    shape = SHAPES[MODELS[name]]
    directory = cache_dir / "models"
    script = str(HERE / "checkpoint.py")
    run([sys.executable, script, str(directory), MODELS[name], str(seed)], log)
    return Model(name, shape, directory / f"{shape.name}-seed{seed}")


def ensure_files(
    model: Model, subject: Subject, python: Path, cache_dir: Path, say: Say
) -> dict[str, str]:
    """What the engine reads beside the checkpoint, by kind. Raises NotInstalledError."""
    if subject.engine == "llama.cpp":
        target = sibling(model, f"{subject.weights}.gguf")
        script = str(HERE / "to_gguf.py")
        command = [str(python), script, str(model.directory), "{}", subject.weights]
        return {"gguf": str(converted(command, target, cache_dir, say))}
    if subject.engine == "openvino":
        target = sibling(model, f"openvino-{subject.weights}")
        export = ensure_packages("openvino-export", cache_dir, say)
        script = str(HERE / "to_openvino.py")
        command = [str(export), script, str(model.directory), "{}", subject.weights]
        return {"openvino": str(converted(command, target, cache_dir, say))}
    return {}


def sibling(model: Model, suffix: str) -> Path:
    return model.directory.with_name(f"{model.directory.name}-{suffix}")


def converted(command: Sequence[str], target: Path, cache_dir: Path, say: Say) -> Path:
    """``target``, written now if it is not there; ``{}`` in the command is where to write."""
    if target.exists():
        return target
    say(f"converting to {target.name}")
    partial = target.with_name(f"partial-{target.name}")
    remove(partial)
    try:
        run(
            [str(partial) if part == "{}" else part for part in command],
            cache_dir / "logs" / "convert.log",
        )
        if not partial.exists():
            raise NotInstalledError(f"the conversion to {target.name} wrote nothing")
        # Renamed last, so that an interrupted conversion leaves nothing that looks complete.
        partial.replace(target)
    finally:
        remove(partial)
    return target


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
