"""The gateway's part of `polymux plugin check`: what a plugin owes over HTTP."""
