"""What every task answers last."""

from __future__ import annotations

import msgspec

from polymux.core.vocabulary import Receipt, Usage


class Done(msgspec.Struct, omit_defaults=True):
    """Always the last answer of a task that did not fail."""

    usage: Usage
    receipt: Receipt
