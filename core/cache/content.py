"""Names for what an encoder is given: equal digests mean equal input, and so equal output.

Dtype, shape and options count like the elements: two pictures of the same bytes and another form are two pictures.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from polymux.core.cache.prefix import DIGEST_BYTES


def content_digest(array: np.ndarray, *options: str) -> bytes:
    """16 bytes for an array of numbers. `options`: whatever else its encoding depends on (model, mode, settings)."""
    hasher = blake2b(digest_size=DIGEST_BYTES)
    hasher.update(repr((array.dtype.str, array.shape, options)).encode())
    hasher.update(np.ascontiguousarray(array).data)
    return hasher.digest()
