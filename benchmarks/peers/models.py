"""Checkpoints and their conversions, made once and kept in the cache directory."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from environments import NotInstalledError, Say, ensure, ensure_packages, run
from gguf_layout import WEIGHTS_FILE
from model_shape import SHAPES, LlamaShape
from subjects import Subject

HERE = Path(__file__).resolve().parent
#: By the name that ``--models`` takes: the shape.
MODELS = {"8m": "8m", "125m": "125m-long", "1b": "1b"}
#: GGUF files that are written from a checkpoint; others are quantized from its bf16 file.
PLAIN_GGUF = ("bf16", "f16", "q8_0")


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint in Hugging Face layout: bfloat16 with seeded random weights, or float32, what
    a GGUF file says.
    """

    name: str
    shape: LlamaShape
    directory: Path
    #: The GGUF file that it is from, and what weights that has.
    file: Path | None = None
    file_weights: str = ""


def ensure_model(name: str, seed: int, cache_dir: Path, log: Path) -> Model:
    """Another process writes it: were torch loaded here too, its pages would count half in
    the workers' proportional memory.
    """
    shape = SHAPES[MODELS[name]]
    directory = cache_dir / "models"
    script = str(HERE / "checkpoint.py")
    run([sys.executable, script, str(directory), MODELS[name], str(seed)], log)
    return Model(name, shape, directory / f"{shape.name}-seed{seed}")


def ensure_model_of(file: Path, cache_dir: Path, say: Say) -> Model:
    """The model of a GGUF file. Raises NotInstalledError where it cannot be converted."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    directory = cache_dir / "models" / f"{file.stem}-{digest[:12]}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE / "from_gguf.py"), str(file), "{}"]
    converted(command, directory, cache_dir, say)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    weights = (directory / WEIGHTS_FILE).read_text(encoding="utf-8")
    return Model(file.stem, shape_of(config), directory, file, weights)


def shape_of(config: Mapping[str, int]) -> LlamaShape:
    return LlamaShape(
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        mlp_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
    )


def ensure_files(model: Model, subject: Subject, cache_dir: Path, say: Say) -> dict[str, str]:
    """What the engine reads instead of the checkpoint, by kind. Raises NotInstalledError."""
    if subject.reads_gguf:
        return {"gguf": str(ensure_gguf(model, subject.weights, cache_dir, say))}
    if subject.engine == "openvino":
        target = sibling(model, f"openvino-{subject.weights}")
        export = ensure_packages("openvino-export", cache_dir, say)
        script = str(HERE / "to_openvino.py")
        command = [str(export), script, str(model.directory), "{}", subject.weights]
        return {"openvino": str(converted(command, target, cache_dir, say))}
    return {}


def ensure_reference(
    model: Model, subject: Subject, files: Mapping[str, str], cache_dir: Path, say: Say
) -> Path:
    """The checkpoint whose tokens the engine's are compared with: of a file of 4 bits, what it
    says; else the model's own. Raises NotInstalledError.
    """
    if not subject.reads_gguf or subject.width != "4 bit":
        return model.directory
    return ensure_model_of(Path(files["gguf"]), cache_dir, say).directory


def ensure_gguf(model: Model, weights: str, cache_dir: Path, say: Say) -> Path:
    """The file itself where it has such weights, else one made from the model."""
    if model.file is not None and weights == model.file_weights:
        return model.file
    environment = ensure("llama.cpp", cache_dir, say)
    python = str(environment.python)
    target = sibling(model, f"{weights}.gguf")
    if model.file is None and weights in PLAIN_GGUF:
        command = [python, str(HERE / "to_gguf.py"), str(model.directory), "{}", weights]
    else:
        source = model.file or ensure_gguf(model, "bf16", cache_dir, say)
        command = [python, str(HERE / "quantize_gguf.py"), str(source), "{}", weights]
    return converted(command, target, cache_dir, say, environment.variables)


def sibling(model: Model, suffix: str) -> Path:
    return model.directory.with_name(f"{model.directory.name}-{suffix}")


def converted(
    command: Sequence[str],
    target: Path,
    cache_dir: Path,
    say: Say,
    added: Mapping[str, str] | None = None,
) -> Path:
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
            added,
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


def size_of(path: Path) -> int:
    """Bytes of a file or of all files in a directory."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file())
