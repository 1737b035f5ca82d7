"""Variants: engine options under a name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vmserve.config import EngineConfig
from vmserve.errors import ConfigurationError
from vmserve.options import declared_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Variant", "parse_variants"]

_SWITCH = {
    **dict.fromkeys(("false", "no", "off", "0"), False),
    **dict.fromkeys(("true", "yes", "on", "1"), True),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """``options`` are fields of :class:`~vmserve.config.EngineConfig`."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def config(self, common: Mapping[str, Any]) -> EngineConfig:
        """Merge with ``common``, the options of all variants; the variant's own win."""
        try:
            return EngineConfig.from_options({**common, **self.options})
        except ConfigurationError as error:
            raise ConfigurationError(f"variant {self.name}: {error}") from None


_REGIMES = {name: Variant(name, {"kv_regime": name}) for name in ("virtual", "paged", "auto")}


def parse_variants(
    text: Sequence[str], known: Mapping[str, Variant] = _REGIMES, *, least: int = 2
) -> list[Variant]:
    """``virtual,paged,auto`` and ``name=option=value,option=value``, in their order.

    ``known``: those that need no options on the command line. Raises ConfigurationError for what
    cannot be understood, names given twice and fewer than ``least`` variants.
    """
    variants: list[Variant] = []
    for item in text:
        if "=" in item:
            variants.append(_with_options(item))
            continue
        for name in filter(None, map(str.strip, item.split(","))):
            if name not in known:
                raise ConfigurationError(
                    f"--variants: no variant is named {name!r}: choose from {', '.join(known)}, or "
                    f"write name=option=value,option=value"
                )
            variants.append(known[name])
    names = [variant.name for variant in variants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"--variants: {', '.join(twice)} is given twice: name each once")
    if len(variants) < least:
        needs = "a comparison needs two or more" if least == 2 else "it takes one or more"
        raise ConfigurationError(
            f"--variants: {needs}, got {', '.join(names) or 'none'}: "
            f"write e.g. --variants {','.join([*known][:2])}"
        )
    return variants


def _with_options(item: str) -> Variant:
    name, _, assignments = item.partition("=")
    name = name.strip()
    if not name or "," in name:
        raise ConfigurationError(
            f"--variants: {item!r}: give variants with options a --variants of their own, as "
            f"name=option=value,option=value"
        )
    options: dict[str, Any] = {}
    for assignment in assignments.split(","):
        option, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigurationError(
                f"--variants: {name}: {assignment!r} has no value: write name=option=value,..."
            )
        key = option.strip().removeprefix("--").replace("-", "_")
        options[key] = _value(name, key, value.strip())
    return Variant(name, options)


def _value(variant: str, option: str, text: str) -> Any:
    """Parse ``text`` as the option's type."""
    known = declared_options(EngineConfig)
    if option not in known:
        raise ConfigurationError(
            f"--variants: {variant}: no engine option is named {option!r}: known are "
            f"{', '.join(sorted(known))}"
        )
    kind = known[option].type
    if text.lower() == "none" and known[option].optional:
        return None
    if kind is bool:
        if text.lower() in _SWITCH:
            return _SWITCH[text.lower()]
        raise ConfigurationError(f"--variants: {variant}: {option} is on or off, not {text!r}")
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        raise ConfigurationError(
            f"--variants: {variant}: {option} is a number, not {text!r}"
        ) from None
