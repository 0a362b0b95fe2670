"""The prefix index: full blocks of computed KV, found again by a chained hash of their tokens.

    digest(block i) = BLAKE2b(digest(block i - 1), tokens of block i [, extra])

The root carries everything else that KV depends on (model, adapter, tenant salt), so equal digests mean equal KV.
`extra` is for content that token ids do not name: an image's pixels, shape and mode. Digests have 128 bits:
a collision is not to be expected, and cannot be made by a tenant who does not know the salt.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


def root_digest(*parts: str) -> bytes:
    return blake2b("\0".join(parts).encode(), digest_size=DIGEST_BYTES).digest()


def chain_digests(
    parent: bytes, tokens: Sequence[int], size: int, extra: Callable[[int], bytes] | None = None
) -> list[bytes]:
    """The digests of all full blocks of `size` tokens behind `parent`; `extra(i)` adds to block i."""
    data = memoryview(array("q", tokens).tobytes())
    step = size * 8
    digests = []
    for block, start in enumerate(range(0, len(data) - step + 1, step)):
        hasher = blake2b(parent, digest_size=DIGEST_BYTES)
        hasher.update(data[start : start + step])
        if extra is not None:
            hasher.update(extra(block))
        parent = hasher.digest()
        digests.append(parent)
    return digests


class LatestChain:
    """The chain that was made last: prompts that come together often begin alike, and what they have in common is
    looked at once."""

    def __init__(self) -> None:
        self._parent = b""
        self._tokens: list[int] = []
        self._digests: list[bytes] = []

    def make(self, parent: bytes, tokens: list[int], size: int) -> list[bytes]:
        """As `chain_digests`; `size` is the same in every call."""
        common = self._count_common(tokens, size) if parent == self._parent else 0
        digests = self._digests[:common]
        digests += chain_digests(digests[-1] if digests else parent, tokens[common * size :], size)
        self._parent, self._tokens, self._digests = parent, tokens[: len(digests) * size], digests[:]
        return digests

    def _count_common(self, tokens: list[int], size: int) -> int:
        """Leading blocks that are the same."""
        low, high = 0, min(len(self._tokens), len(tokens)) // size
        if tokens[:size] != self._tokens[:size]:
            return 0
        while low < high:
            middle = (low + high + 1) // 2
            if tokens[low * size : middle * size] == self._tokens[low * size : middle * size]:
                low = middle
            else:
                high = middle - 1
        return low


class PrefixIndex:
    """digest <-> block. The first block computed for a digest keeps it; later equals stay private to their rows."""

    def __init__(self) -> None:
        self._block: dict[bytes, int] = {}
        self._digest: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block)

    def __contains__(self, block: int) -> bool:
        return block in self._digest

    def find(self, digest: bytes) -> int | None:
        return self._block.get(digest)

    def follow(self, chain: Sequence[bytes]) -> list[int]:
        """The blocks of a chain, up to the first that is missing."""
        if not chain or chain[0] not in self._block:
            return []
        found = [block for block in map(self._block.get, chain) if block is not None]
        if len(found) == len(chain):
            return found
        return found[: next(place for place, digest in enumerate(chain) if digest not in self._block)]

    def publish(self, digest: bytes, block: int) -> None:
        """Only for a full block whose KV has really been computed."""
        if digest not in self._block and block not in self._digest:
            self._block[digest] = block
            self._digest[block] = digest

    def forget(self, block: int) -> None:
        digest = self._digest.pop(block, None)
        if digest is not None:
            del self._block[digest]
