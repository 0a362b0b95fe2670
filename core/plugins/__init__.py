"""Plugins: found, registered and called one at a time, so that a broken one costs only itself."""

from polymux.core.plugins.discovery import load_plugins
from polymux.core.plugins.example import Example
from polymux.core.plugins.plugin import Fault, Plugin
from polymux.core.plugins.registry import Plugins

__all__ = ["Example", "Fault", "Plugin", "Plugins", "load_plugins"]
