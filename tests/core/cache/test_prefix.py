"""The prefix index: equal digests mean equal content, and one block per digest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polymux.core.cache.prefix import DIGEST_BYTES, PrefixIndex, chain_digest, root_digest

ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@given(ids, ids, st.binary(max_size=3), st.binary(max_size=3))
def test_digests_tell_content_apart(one: list[int], other: list[int], extra: bytes, more: bytes) -> None:
    """The same parent, tokens and extra give the same digest; anything else another one."""
    root = root_digest("model", "salt")
    first, second = chain_digest(root, one, extra), chain_digest(root, other, more)
    assert (first == second) == ((one, extra) == (other, more))
    assert len(first) == DIGEST_BYTES


@given(ids)
def test_a_digest_depends_on_everything_before(tokens: list[int]) -> None:
    assert chain_digest(root_digest("a"), tokens) != chain_digest(root_digest("b"), tokens)


def test_parts_of_the_root_do_not_run_together() -> None:
    """A tenant cannot spell another's model and salt."""
    assert root_digest("ab", "c") != root_digest("a", "bc")


def test_the_first_block_of_a_digest_keeps_it() -> None:
    index = PrefixIndex()
    index.publish(b"x", 1)
    index.publish(b"x", 2)
    index.publish(b"y", 1)
    assert index.find(b"x") == 1
    assert index.find(b"y") is None
    assert 2 not in index
    index.forget(2)
    assert index.find(b"x") == 1
    index.forget(1)
    assert index.find(b"x") is None
    assert len(index) == 0
