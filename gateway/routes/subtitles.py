"""Segments as subtitles: SubRip and WebVTT."""

from __future__ import annotations

from collections.abc import Iterable

from polymux.core.tasks import Segment


def write_srt(segments: Iterable[Segment]) -> str:
    """SubRip. Nothing at all when nothing was said."""
    return "".join(
        f"{number}\n{_stamp(segment.start, ',')} --> {_stamp(segment.end, ',')}\n{_line(segment)}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def write_vtt(segments: Iterable[Segment]) -> str:
    """WebVTT."""
    cues = (
        f"\n{_stamp(segment.start, '.')} --> {_stamp(segment.end, '.')}\n{_escape(_line(segment))}\n"
        for segment in segments
    )
    return "WEBVTT\n" + "".join(cues)


def _line(segment: Segment) -> str:
    """One line: an empty one would end the cue, and an arrow would begin another."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _stamp(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
