"""Every error that a user can meet carries its HTTP status and code.

    PolymuxError
    ├── InvalidRequest        400  the user can fix the request
    │   └── ContextTooLong    400  context_length_exceeded
    ├── Unauthorized          401
    ├── ModelNotFound         404  model_not_found, lists the served names
    ├── TooLarge              413
    ├── UnsupportedMedia      415
    ├── Overloaded            429  queue or quota full, with Retry-After
    ├── NotReady              503  loading, draining, restarting
    │   └── EngineDied        503  the engine went away under this request
    ├── DeadlineExceeded      504
    ├── InternalError         500  our fault, never the request's
    ├── ModelError            (start-up) a model reference cannot be resolved or loaded
    ├── ConfigError           (start-up) a setting is wrong
    └── PluginError           (start-up) a plugin broke the contract

Errors cross processes as plain data: `to_wire` and `from_wire`.
"""

from __future__ import annotations

from typing import Any


class PolymuxError(Exception):
    """An error with an HTTP status; `message` says what was wrong and what to do."""

    status = 500
    type = "server_error"
    code: str | None = None
    """What programs tell errors apart by; None: the kind's own."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.retry_after = retry_after

    def to_wire(self) -> dict[str, Any]:
        """The error as plain data, for another process."""
        return {
            "status": self.status,
            "type": self.type,
            "message": self.message,
            "param": self.param,
            "code": self.code,
            "retry_after": self.retry_after,
        }

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> PolymuxError:
        """The error on this side of a process boundary; status and type are the sender's."""
        error = PolymuxError(
            wire["message"], param=wire.get("param"), code=wire.get("code"), retry_after=wire.get("retry_after")
        )
        error.status = wire["status"]
        error.type = wire["type"]
        return error


class InvalidRequest(PolymuxError):
    """The user can fix the request; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """More than the model reads."""

    code = "context_length_exceeded"


class Unauthorized(PolymuxError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ModelNotFound(PolymuxError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class NotFound(PolymuxError):
    """A thing of the server's own (a file, a job) that is not there, or no longer."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class TooLarge(PolymuxError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMedia(PolymuxError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class Overloaded(PolymuxError):
    status = 429
    type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0, **kwargs: Any) -> None:
        super().__init__(message, retry_after=retry_after, **kwargs)


class NotReady(PolymuxError):
    status = 503
    type = "service_unavailable"
    code = "not_ready"

    def __init__(self, message: str, *, retry_after: float = 1.0, **kwargs: Any) -> None:
        super().__init__(message, retry_after=retry_after, **kwargs)


class EngineDied(NotReady):
    code = "engine_died"


class DeadlineExceeded(PolymuxError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class InternalError(PolymuxError):
    """Our fault, never the request's."""

    code = "internal_error"


class ModelError(PolymuxError):
    """A model reference cannot be resolved, verified or loaded."""

    code = "model_error"


class ConfigError(PolymuxError):
    """A setting is unknown, malformed or contradicts another."""

    code = "config_error"


class PluginError(PolymuxError):
    """A plugin broke the contract; the message names plugin, hook and next action."""

    code = "plugin_error"
