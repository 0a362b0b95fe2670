"""What a plugin owes, as tests: `polymux plugin check` runs them on any plugin, ours included.

The files `check_*.py` here are core's part; a plugin may bring more through the hook `checks` (the gateway does).
`plugin.py` is the pytest plugin behind them: it says which plugin is checked and offers it as fixtures.
"""

from polymux.core.testing.conformance.runner import run_checks

__all__ = ["run_checks"]
