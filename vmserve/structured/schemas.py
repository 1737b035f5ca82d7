"""Write what llguidance does not know of a JSON schema in words that it knows."""

from __future__ import annotations

import itertools
from typing import Any, Final

__all__ = ["MOST_EXPANDED", "mentions_rewritten", "rewritten"]

#: Keywords that are rewritten.
_REWRITTEN: Final = ("uniqueItems", "dependentRequired")
#: Places of schemas within a schema: as values of a mapping, in a list, or themselves. The rest is
#: data, which may have keys of the same names.
_MAPPINGS: Final = ("$defs", "definitions", "patternProperties", "properties")
_LISTS: Final = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_SINGLE: Final = ("additionalProperties", "items")
#: Most values of a list: n different ones have n! orders, each of which is an alternative of the
#: grammar.
_MOST_VALUES: Final = 4
#: Most rewritten keywords of a schema, or of all tools' together, so that short ones make no long
#: grammar.
MOST_EXPANDED: Final = 16
#: Characters of the values, each of which is written n! times: schemas may refer to long ones.
_MOST_CHARS: Final = 128
#: Most keys of dependentRequired: alternatives double with each.
_MOST_DEPENDENT: Final = 4
#: Keywords that a schema of a few values may have besides them.
_PLAIN: Final = frozenset({"const", "default", "description", "enum", "examples", "title", "type"})
_KINDS: Final[dict[type, str]] = {bool: "boolean", int: "integer", str: "string"}


def mentions_rewritten(text: str) -> bool:
    """Return whether :func:`rewritten` may change the schema with this JSON text."""
    return any(f'"{name}"' in text for name in _REWRITTEN)


def rewritten(schema: Any, most_expanded: int = MOST_EXPANDED) -> tuple[Any, list[str]]:
    """The schema as the grammar enforces it, and the keywords that were left out of it.

    ``uniqueItems`` of up to four known values becomes a list of their orders; of other items it is
    left out, since a grammar cannot remember them. ``dependentRequired`` becomes alternatives.
    """
    rewriter = _Rewriter(schema, most_expanded)
    changed = rewriter.node(schema)
    return changed, ["uniqueItems"] if rewriter.leaves_out else []


class _Rewriter:
    def __init__(self, root: Any, most_expanded: int) -> None:
        self._root = root
        self._num_left = most_expanded
        self.leaves_out = False

    def node(self, schema: Any) -> Any:
        """Convert a schema and all within it."""
        if not isinstance(schema, dict):
            return schema  # true, false, or what llguidance refuses
        node = dict(schema)
        for name in _MAPPINGS:
            if isinstance(node.get(name), dict):
                node[name] = {key: self.node(each) for key, each in node[name].items()}
        for name in _LISTS:
            if isinstance(node.get(name), list):
                node[name] = [self.node(each) for each in node[name]]
        for name in _SINGLE:
            if isinstance(node.get(name), dict):
                node[name] = self.node(node[name])
        if isinstance(node.get("uniqueItems"), bool) and node.pop("uniqueItems"):
            self._make_unique(node)
        _require_dependent(node)
        return node

    def _make_unique(self, node: dict[str, Any]) -> None:
        if node.get("maxItems") in (0, 1):
            return
        values = self._values(node.get("items"))
        is_free = not node.keys() & {"anyOf", "prefixItems"}
        if values is None or not is_free or self._num_left == 0:
            self.leaves_out = True
            return
        self._num_left -= 1  # "items" stays: others may refer to it
        node["anyOf"] = [
            {"prefixItems": [{"const": value} for value in order], "items": False}
            for order in itertools.permutations(values)
        ]

    def _values(self, items: Any) -> list[Any] | None:
        """The values that ``items`` allows, if they are few."""
        if isinstance(items, dict) and isinstance(items.get("$ref"), str):
            items = self._target(items["$ref"]) if len(items) == 1 else None
        if not isinstance(items, dict) or items.keys() - _PLAIN:
            return None
        values = [items["const"]] if "const" in items else items.get("enum")
        if values is None and items.get("type") == "boolean":
            values = [False, True]
        if not isinstance(values, list) or not values:
            return None
        [kind, *others] = {type(value) for value in values}
        if others or kind not in _KINDS or items.get("type", _KINDS[kind]) != _KINDS[kind]:
            return None  # 1 and 1.0 would be one value
        values = list(dict.fromkeys(values))
        if len(values) > _MOST_VALUES or sum(len(str(value)) for value in values) > _MOST_CHARS:
            return None
        return values

    def _target(self, reference: str) -> Any:
        """What a reference within the document refers to, as ``#/$defs/Color``."""
        start, *path = reference.split("/")
        found = self._root if start == "#" else None
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found


def _require_dependent(node: dict[str, Any]) -> None:
    """``dependentRequired``: for each property, it is absent or others are there."""
    dependent = node.get("dependentRequired")
    if not isinstance(dependent, dict) or len(dependent) > _MOST_DEPENDENT:
        return
    if not isinstance(node.get("allOf", []), list):
        return
    del node["dependentRequired"]
    alternatives = [
        {"anyOf": [{"properties": {name: False}}, {"required": others}]}
        for name, others in dependent.items()
    ]
    node["allOf"] = [*node.get("allOf", ()), *alternatives]
