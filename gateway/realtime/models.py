"""Which models serve a session: one listens, one answers, one speaks, and each can be any that can."""

from __future__ import annotations

from polymux.core.errors import InvalidRequest
from polymux.gateway.schemas.realtime import Session
from polymux.gateway.state import Gateway


class Models:
    def __init__(self, gateway: Gateway) -> None:
        self._service = gateway.service

    def listener(self, session: Session) -> str:
        transcription = session.audio.input.transcription
        named = transcription.model if transcription else None
        return self._choose(named, "listen", "session.audio.input.transcription.model")

    def find_listener(self, named: str | None) -> str:
        return self._choose(named, "listen", "model")

    def answerer(self, session: Session) -> str:
        return self._choose(session.model, "chat", "session.model")

    def speaker(self, session: Session) -> str:
        named = session.model if self.speaks_only(session) else session.audio.output.model
        return self._choose(named, "speak", "session.audio.output.model")

    def speaks_only(self, session: Session) -> bool:
        """Whether the session's model is a voice, which says what it is given."""
        return session.model is not None and "speak" in self._service.find(session.model).tasks

    def check(self, session: Session) -> None:
        """Raises `ModelNotFound` or `InvalidRequest` for a named model that cannot do what it is named for."""
        if session.audio.input.transcription is not None and session.audio.input.transcription.model:
            self.listener(session)
        if session.type == "realtime":
            if session.model is not None and not self.speaks_only(session):
                self.answerer(session)
            if session.audio.output.model is not None:
                self.speaker(session)

    def _choose(self, named: str | None, task: str, place: str) -> str:
        """The own name of the model that is named, or of the first that serves the task."""
        if named is None:
            able = [served.name for served in self._service.models if task in served.tasks]
            if not able:
                raise InvalidRequest(f"no model is served here that can {task}", param=place)
            return able[0]
        served = self._service.find(named)
        if task not in served.tasks:
            raise InvalidRequest(
                f"model {served.name} cannot {task}; it serves: {', '.join(served.tasks)}", param=place
            )
        return served.name
