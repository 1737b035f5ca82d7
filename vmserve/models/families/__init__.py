"""The decoder's families: convert their configurations to its description."""

from __future__ import annotations

from collections.abc import Mapping

from vmserve.models.families import delta, experts, gemma, gpt, latent, llama
from vmserve.models.families.base import Family

__all__ = ["FAMILIES", "Family"]

#: Families by the name in ``architectures`` of config.json.
FAMILIES: Mapping[str, Family] = {
    **llama.FAMILIES,
    **experts.FAMILIES,
    **delta.FAMILIES,
    **latent.FAMILIES,
    **gemma.FAMILIES,
    **gpt.FAMILIES,
}
