"""Lists of token ids."""

from __future__ import annotations

import gc
import weakref

from vmserve.sampling.tokens import token_list


def test_the_collector_does_not_visit_token_lists() -> None:
    tokens = token_list(range(5))
    assert tokens == [0, 1, 2, 3, 4]
    assert not gc.is_tracked(tokens)
    tokens.append(7)
    tokens += [8] * 10_000
    assert not gc.is_tracked(tokens)
    assert gc.is_tracked(list(tokens))


def test_what_holds_one_is_freed() -> None:
    class Holder:
        pass

    holder = Holder()
    holder.tokens, holder.itself = token_list(range(1000)), holder  # type: ignore[attr-defined]
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None
