"""Installs the peers, each in a virtual environment of its own under the cache directory.

An environment is kept as long as its requirement file, the interpreter and, for what is compiled
here, the processor's instructions stay the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
#: Drawn in by others and used by nothing here. The registry's builds of them are for torch with
#: CUDA; beside torch for processors, importing one fails and takes its importer with it.
UNUSED = ("torchaudio", "torchcodec", "torchvision")
#: The bindings alone: the libraries come from :func:`build_llama_cpp`, which builds a server too.
#: A variable, as pip 23 ignores ``--config-settings`` for what a requirement file names.
BINDINGS_ONLY = {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"}
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_CCACHE=OFF",
    *(f"-DLLAMA_BUILD_{each}=OFF" for each in ("TESTS", "EXAMPLES", "APP", "UI")),
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_NUMBER=1",
)
#: By the instruction set asked for: "" is the processor's own.
ISA_OPTIONS = {
    "": ("-DGGML_NATIVE=ON",),
    "avx2": (
        "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{each}=ON" for each in ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2")),
    ),
}
LIBRARY, SERVER = "llama", "llama-server"
TAIL_CHARS = 600

Say = Callable[[str], None]


class NotInstalledError(Exception):
    """Why a peer cannot be here; it is reported in its place in the results."""


@dataclass(frozen=True, slots=True)
class Environment:
    """``python`` runs the engine's worker. ``tools``: programs beside it, by name."""

    python: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    tools: Mapping[str, Path] = field(default_factory=dict)


def ensure(engine: str, cache_dir: Path, say: Say, isa: str = "") -> Environment:
    """The engine's environment, made now if it is not there. Raises NotInstalledError."""
    if engine == "vmserve":
        return Environment(Path(sys.executable), {"VMSERVE_CPU_ISA": isa} if isa else {})
    if engine == "transformers" and is_installed_here(engine):
        return Environment(Path(sys.executable))
    if engine == "llama.cpp":
        python = ensure_packages("llama-cpp", cache_dir, say, ("--no-binary", "llama-cpp-python"))
        library = str(build_llama_cpp(LIBRARY, cache_dir, python, say, isa))
        return Environment(python, {"LLAMA_CPP_LIB_PATH": library, "LD_LIBRARY_PATH": library})
    name = "vllm-zen" if engine == "vllm" and is_zen(processor()) else engine
    return Environment(ensure_packages(name, cache_dir, say))


def is_installed_here(name: str) -> bool:
    """Whether this interpreter has what ``requirements/<name>.txt`` pins, version by version."""
    lines = (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines)
    with contextlib.suppress(metadata.PackageNotFoundError):
        return all(metadata.version(each).split("+")[0] == pins[each] for each in pins)
    return False


def ensure_server(
    engine: str, found: Environment, cache_dir: Path, say: Say, isa: str = ""
) -> Environment:
    """The same with the program that serves. Raises NotInstalledError."""
    if engine != "llama.cpp":
        return found
    directory = build_llama_cpp(SERVER, cache_dir, found.python, say, isa)
    return replace(found, tools={SERVER: directory / SERVER})


def ensure_packages(name: str, cache_dir: Path, say: Say, options: Sequence[str] = ()) -> Path:
    """The interpreter of an environment with what ``requirements/<name>.txt`` names."""
    requirements = REQUIREMENTS / f"{name}.txt"
    directory = cache_dir / "envs" / name
    python, stamped = directory / "bin" / "python", directory / "stamp.json"
    wanted = stamp(requirements.read_text(encoding="utf-8"), *options)
    if python.exists() and is_stamped(stamped, wanted):
        return python
    say(f"installing {name} into {directory}")
    log = cache_dir / "logs" / f"{name}.log"
    if not python.exists():
        run([sys.executable, "-m", "venv", str(directory)], log)
    pip = [str(python), "-m", "pip"]
    run([*pip, "install", *options, "-r", str(requirements)], log, BINDINGS_ONLY)
    run([*pip, "uninstall", "-y", *UNUSED], log)
    stamped.write_text(json.dumps(wanted), encoding="utf-8")
    return python


def build_llama_cpp(target: str, cache_dir: Path, python: Path, say: Say, isa: str) -> Path:
    """The directory with llama.cpp's libraries, or with its server beside them, built from the
    source that the Python package of that version carries.
    """
    directory = cache_dir / "llama.cpp"
    build = directory / (f"build-{isa}" if isa else "build")
    stamped = build / f"stamp-{target}.json"
    cmake_options = (*CMAKE_OPTIONS, *ISA_OPTIONS[isa])
    lines = (REQUIREMENTS / "llama-cpp.txt").read_text(encoding="utf-8").splitlines()
    [requirement] = (line for line in lines if line.startswith("llama-cpp-python=="))
    wanted = stamp(requirement, *cmake_options, processor())
    if is_stamped(stamped, wanted):
        return build / "bin"
    say(f"building {target} of llama.cpp in {build} (once, some minutes)")
    directory.mkdir(parents=True, exist_ok=True)
    log = cache_dir / "logs" / "llama-cpp-build.log"
    if missing := [tool for tool in ("cmake", "g++") if shutil.which(tool) is None]:
        raise NotInstalledError(f"building llama.cpp needs {' and '.join(missing)}")
    package = f"llama_cpp_python-{requirement.partition('==')[2]}"
    source = directory / package / "vendor" / "llama.cpp"
    if not source.is_dir():
        download = [str(python), "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        run([*download, "-d", str(directory), requirement], log)
        with tarfile.open(directory / f"{package}.tar.gz") as archive:
            archive.extractall(directory, filter="data")
    run(["cmake", "-S", str(source), "-B", str(build), *cmake_options], log)
    jobs = str(len(os.sched_getaffinity(0)))
    run(["cmake", "--build", str(build), "-j", jobs, "--target", target], log)
    stamped.write_text(json.dumps(wanted), encoding="utf-8")
    return build / "bin"


def stamp(*parts: str) -> dict[str, str]:
    """What an environment was made from."""
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return {"python": sys.version.split()[0], "made_from": digest}


def is_stamped(path: Path, wanted: Mapping[str, str]) -> bool:
    return path.exists() and json.loads(path.read_text(encoding="utf-8")) == wanted


def processor() -> str:
    """Maker, model and instructions: native code for one processor may not run on another."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    wanted = ("vendor_id", "model name", "flags", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def is_zen(cpuinfo: str) -> bool:
    """Whether vLLM takes AMD's kernels on a processor, if they are installed: its own rule."""
    return "AuthenticAMD" in cpuinfo and "avx512" in cpuinfo


def run(command: Sequence[str], log: Path, added: Mapping[str, str] | None = None) -> None:
    """A command with its output added to ``log``. Raises NotInstalledError with its end.

    ``added``: to its environment.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        began = output.tell()
        environment = {**os.environ, **(added or {})}
        done = subprocess.run(command, stdout=output, stderr=output, check=False, env=environment)
    if done.returncode != 0:
        told = log.read_bytes()[began:].decode(errors="replace").strip()[-TAIL_CHARS:]
        what = " ".join(Path(part).name if part.startswith("/") else part for part in command[:5])
        raise NotInstalledError(f"{what} ended with {done.returncode}: {told}")
