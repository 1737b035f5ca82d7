"""Installs the peers, each in a virtual environment of its own under the cache directory.

An environment is kept as long as its requirement file, the interpreter and, for what is compiled
here, the processor's instructions stay the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
#: By engine: the environment that it runs in.
ENVIRONMENTS = {
    "transformers": "transformers",
    "llama.cpp": "llama-cpp",
    "openvino": "openvino",
    "vllm": "vllm",
}
#: Drawn in by others and used by nothing here. The registry's builds of them are for torch with
#: CUDA; beside torch for processors, importing one fails and takes its importer with it.
UNUSED = {
    "openvino-export": ("torchvision",),
    "vllm": ("torchaudio", "torchcodec", "torchvision"),
    "vllm-zen": ("torchaudio", "torchcodec", "torchvision"),
}
#: The bindings alone: the libraries come from :func:`build_llama_cpp`, which builds a server too.
#: A variable, as pip 23 ignores ``--config-settings`` for what a requirement file names.
BINDINGS_ONLY = {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"}
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
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
#: Chooses vmserve's kernels.
ISA_VARIABLE = "VMSERVE_CPU_ISA"

Say = Callable[[str], None]


class NotInstalledError(Exception):
    """Why a peer cannot be here; it is reported in its place in the results."""


@dataclass(frozen=True, slots=True)
class Environment:
    """``python`` runs the engine's worker. ``tools``: programs beside it, by name."""

    python: Path
    variables: Mapping[str, str]
    tools: Mapping[str, Path]


def ensure(engine: str, cache_dir: Path, say: Say, isa: str = "") -> Environment:
    """The engine's environment, made now if it is not there. Raises NotInstalledError."""
    if engine == "vmserve":
        return Environment(Path(sys.executable), {ISA_VARIABLE: isa} if isa else {}, {})
    name = ENVIRONMENTS[engine]
    if engine == "vllm" and is_zen(processor()):
        name = "vllm-zen"
    if engine == "transformers" and is_installed_here(name):
        return Environment(Path(sys.executable), {}, {})
    if engine == "llama.cpp":
        python = ensure_packages(name, cache_dir, say, ("--no-binary", "llama-cpp-python"))
        library = build_llama_cpp(LIBRARY, cache_dir, python, say, isa)
        variables = {"LLAMA_CPP_LIB_PATH": str(library), "LD_LIBRARY_PATH": str(library)}
        return Environment(python, variables, {})
    return Environment(ensure_packages(name, cache_dir, say), {}, {})


def is_installed_here(name: str) -> bool:
    """Whether this interpreter has what ``requirements/<name>.txt`` pins, version by version."""
    for line in (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        package, _, version = line.partition("==")
        try:
            if metadata.version(package).partition("+")[0] != version:
                return False
        except metadata.PackageNotFoundError:
            return False
    return True


def ensure_server(
    engine: str, found: Environment, cache_dir: Path, say: Say, isa: str = ""
) -> Environment:
    """The same with the program that serves. Raises NotInstalledError."""
    if engine == "llama.cpp":
        directory = build_llama_cpp(SERVER, cache_dir, found.python, say, isa)
        return replace(found, tools={SERVER: directory / SERVER})
    return found


def ensure_packages(name: str, cache_dir: Path, say: Say, options: Sequence[str] = ()) -> Path:
    """The interpreter of an environment with what ``requirements/<name>.txt`` names."""
    requirements = REQUIREMENTS / f"{name}.txt"
    directory = cache_dir / "envs" / name
    python = directory / "bin" / "python"
    wanted = stamp(requirements.read_text(encoding="utf-8"), *options)
    if python.exists() and is_stamped(directory, wanted):
        return python
    say(f"installing {name} into {directory}")
    log = cache_dir / "logs" / f"{name}.log"
    if not python.exists():
        run([sys.executable, "-m", "venv", str(directory)], log)
    install = [str(python), "-m", "pip", "install", *options, "-r", str(requirements)]
    run(install, log, BINDINGS_ONLY)
    if name in UNUSED:
        run([str(python), "-m", "pip", "uninstall", "-y", *UNUSED[name]], log)
    put_stamp(directory, wanted)
    return python


def build_llama_cpp(target: str, cache_dir: Path, python: Path, say: Say, isa: str) -> Path:
    """The directory with llama.cpp's libraries, or with its server beside them, built from the
    source that the Python package of that version carries.
    """
    directory = cache_dir / "llama.cpp"
    build = directory / (f"build-{isa}" if isa else "build")
    cmake_options = (*CMAKE_OPTIONS, *ISA_OPTIONS[isa])
    requirement = next(
        line
        for line in (REQUIREMENTS / "llama-cpp.txt").read_text(encoding="utf-8").splitlines()
        if line.startswith("llama-cpp-python==")
    )
    wanted = stamp(requirement, *cmake_options, processor())
    if is_stamped(build, wanted, target):
        return build / "bin"
    say(f"building {target} of llama.cpp in {build} (once, some minutes)")
    directory.mkdir(parents=True, exist_ok=True)
    log = cache_dir / "logs" / "llama-cpp-build.log"
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            raise NotInstalledError(f"building llama.cpp needs {tool}, which is not here")
    source = unpacked(directory, python, requirement, log)
    run(["cmake", "-S", str(source), "-B", str(build), *cmake_options], log)
    jobs = str(len(os.sched_getaffinity(0)))
    run(["cmake", "--build", str(build), "-j", jobs, "--target", target], log)
    put_stamp(build, wanted, target)
    return build / "bin"


def unpacked(directory: Path, python: Path, requirement: str, log: Path) -> Path:
    """llama.cpp's source inside that of the package, downloaded and unpacked once."""
    version = requirement.partition("==")[2]
    source = directory / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp"
    if not source.is_dir():
        command = [str(python), "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
        run([*command, "-d", str(directory), requirement], log)
        with tarfile.open(directory / f"llama_cpp_python-{version}.tar.gz") as archive:
            archive.extractall(directory, filter="data")
    return source


def stamp(*parts: str) -> dict[str, str]:
    """What an environment was made from."""
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return {"python": sys.version.split()[0], "made_from": digest}


def is_stamped(directory: Path, wanted: Mapping[str, str], name: str = "") -> bool:
    path = stamp_path(directory, name)
    return path.exists() and json.loads(path.read_text(encoding="utf-8")) == wanted


def put_stamp(directory: Path, made_from: Mapping[str, str], name: str = "") -> None:
    stamp_path(directory, name).write_text(json.dumps(made_from), encoding="utf-8")


def stamp_path(directory: Path, name: str) -> Path:
    return directory / (f"stamp-{name}.json" if name else "stamp.json")


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
        done = subprocess.run(
            command, stdout=output, stderr=output, check=False, env={**os.environ, **(added or {})}
        )
    if done.returncode != 0:
        told = log.read_bytes()[began:].decode(errors="replace").strip()[-TAIL_CHARS:]
        what = " ".join(Path(part).name if part.startswith("/") else part for part in command[:5])
        raise NotInstalledError(f"{what} ended with {done.returncode}: {told}")
