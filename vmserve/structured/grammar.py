"""Convert a request's constraint to the grammar that llguidance compiles.

Runs in the vetting process only: converting a hostile grammar may take any time.
"""

from __future__ import annotations

import json

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from vmserve.structured.schemas import mentions_rewritten, rewritten
from vmserve.structured.spec import Constraint

__all__ = ["JSON_OPTIONS", "PARSER_LIMITS", "BadGrammarError", "to_grammar", "vetted"]

#: Options of JSON. One space at most stands where JSON allows white space: it is bounded, and a
#: weak model goes on.
JSON_OPTIONS = {
    "whitespace_flexible": False,
    "whitespace_pattern": " ?",
    "lenient": False,
}
#: Limits of one parser: states of its lexer, and by llguidance's defaults the work of each mask.
PARSER_LIMITS = LLParserLimits(max_lexer_states=25_000, verbose_errors=False)
_MAX_TOLD = 400


class BadGrammarError(Exception):
    """The grammar cannot be compiled; the text says why."""


def to_grammar(constraint: Constraint) -> str:
    """Convert to llguidance's own form. Raises :class:`BadGrammarError`."""
    kind, text = constraint
    try:
        if kind == "json":
            if mentions_rewritten(text):
                text = json.dumps(rewritten(json.loads(text))[0], ensure_ascii=False)
            return str(LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS))  # type: ignore[arg-type]
        if kind == "regex":
            return str(LLMatcher.grammar_from_regex(text))
        if kind == "choice":
            return str(LLMatcher.grammar_from_lark(_choice_rule(json.loads(text))))
        return str(LLMatcher.grammar_from_lark(any_to_lark(text)))
    except RecursionError:
        raise BadGrammarError("it is nested too deep") from None
    except Exception as error:  # noqa: BLE001  the converter raises bare exceptions
        raise BadGrammarError(_reason(str(error))) from None


def _choice_rule(choices: list[str]) -> str:
    # Lark's strings are those of JSON.
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def vetted(constraint: Constraint, tokenizer: LLTokenizer) -> str:
    """Return the grammar after compiling it, computing its first mask and taking a token of it.

    Raises :class:`BadGrammarError`.
    """
    grammar = to_grammar(constraint)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=PARSER_LIMITS)
    allowed, remedy = 0, ""
    if not matcher.is_error():
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    if allowed and not matcher.is_error():
        matcher.consume_token((allowed & -allowed).bit_length() - 1)  # the lowest id
        remedy = ": make it simpler"
    if matcher.is_error():
        raise BadGrammarError(_reason(matcher.get_error()) + remedy)
    return grammar


def _reason(error: str) -> str:
    if error.startswith(("NoExtension", "EndOfSentence")):
        return "nothing can match it"
    text = error.partition("<state>")[0].strip()
    return text if len(text) <= _MAX_TOLD else text[:_MAX_TOLD] + "…"
