"""Checkpoints and their conversions, made once and kept in the cache directory."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import Say, ensure, ensure_packages, run
from subjects import Subject

Json = dict[str, Any]

HERE = Path(__file__).resolve().parent
BOS_ID, EOS_ID, PAD_ID = 1, 2, 0
SPECIAL_IDS = (PAD_ID, BOS_ID, EOS_ID)
#: Random Llamas, by name.
SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "intermediate_size", "vocab_size", "max_position_embeddings")  # fmt: skip
SHAPES = {
    "smoke": (64, 2, 4, 2, 128, 512, 2048),
    "8m": (288, 6, 6, 6, 768, 4096, 4096),
    "125m": (768, 12, 12, 4, 2048, 32_000, 4096),
    "1b": (2048, 16, 32, 8, 8192, 32_000, 4096),
}
#: Those that ``--models`` takes.
MODELS = ("8m", "125m", "1b")
#: GGUF files that are written from a checkpoint; others are quantized from its bf16 file.
PLAIN_GGUF = ("bf16", "f16", "q8_0")
#: In a checkpoint that was a GGUF file: which weights that has, as ``--peers`` names them.
WEIGHTS_FILE = "gguf_weights.txt"


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint in Hugging Face layout: bfloat16 with seeded random weights, or float32, what
    a GGUF file says (``file``, ``file_weights``).
    """

    name: str
    config: Mapping[str, Any]
    directory: Path
    file: Path | None = None
    file_weights: str = ""


def config_of(name: str) -> Json:
    """The ``config.json`` of a random Llama, with untied embeddings."""
    hidden, _, heads, *_ = SHAPES[name]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **dict(zip(SHAPE, SHAPES[name], strict=True)),
    }


def directory_name(name: str, seed: int) -> str:
    shape = "llama-h{}-l{}-q{}-kv{}-m{}-v{}-c{}".format(*SHAPES[name])
    return f"{shape.removesuffix('-c2048')}-seed{seed}"


def ensure_model(name: str, seed: int, cache_dir: Path) -> Model:
    """Another process writes it: were torch loaded here too, its pages would count half in
    the workers' proportional memory.
    """
    directory = cache_dir / "models"
    script = str(HERE / "checkpoint.py")
    log = cache_dir / "logs" / "checkpoint.log"
    run([sys.executable, script, str(directory), name, str(seed)], log)
    return Model(name, config_of(name), directory / directory_name(name, seed))


def ensure_model_of(file: Path, cache_dir: Path, say: Say) -> Model:
    """The model of a GGUF file. Raises NotInstalledError where it cannot be converted."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    directory = cache_dir / "models" / f"{file.stem}-{digest[:12]}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    converted(
        [sys.executable, str(HERE / "from_gguf.py"), str(file), "{}"], directory, cache_dir, say
    )
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    weights = (directory / WEIGHTS_FILE).read_text(encoding="utf-8")
    return Model(file.stem, config, directory, file, weights)


def ensure_files(model: Model, subject: Subject, cache_dir: Path, say: Say) -> dict[str, str]:
    """What the engine reads instead of the checkpoint, by kind. Raises NotInstalledError."""
    if subject.reads_gguf:
        return {"gguf": str(ensure_gguf(model, subject.weights, cache_dir, say))}
    if subject.engine == "openvino":
        export, script = ensure_packages("openvino-export", cache_dir, say), HERE / "to_openvino.py"
        command = [str(export), str(script), str(model.directory), "{}", subject.weights]
        target = f"{model.directory}-openvino-{subject.weights}"
        return {"openvino": str(converted(command, Path(target), cache_dir, say))}
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
    script, source = "to_gguf.py", model.directory
    if model.file is not None or weights not in PLAIN_GGUF:
        script = "quantize_gguf.py"
        source = model.file or ensure_gguf(model, "bf16", cache_dir, say)
    command = [str(environment.python), str(HERE / script), str(source), "{}", weights]
    target = Path(f"{model.directory}-{weights}.gguf")
    return converted(command, target, cache_dir, say, environment.variables)


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
    # Renamed last, so that an interrupted conversion leaves nothing that looks complete.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="partial-") as scratch:
        partial = Path(scratch, target.name)
        command = [str(partial) if part == "{}" else part for part in command]
        run(command, cache_dir / "logs" / "convert.log", added)
        partial.rename(target)
    return target


def size_of(path: Path) -> int:
    """Bytes of a file or of all files in a directory."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files if each.is_file())
