"""Transcription sessions by the official client: what is heard, in the order the protocol says."""

from __future__ import annotations

import base64

import pytest

pytestmark = pytest.mark.anyio

TRANSCRIBE = {"extra_query": {"intent": "transcription"}}
MANUAL = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_speech_is_found_committed_and_written_down(talking_live):
    async with talking_live(**TRANSCRIBE) as talk:
        assert talk.events[0].session.type == "transcription"
        assert talk.events[0].session.audio.input.turn_detection.threshold == 0.5
        await talk.append(0.2)
        await talk.append(0.3, level=0.5)
        await talk.append(0.5)
        completed = await talk.until("conversation.item.input_audio_transcription.completed")
        delta = "conversation.item.input_audio_transcription.delta"
        assert talk.types()[1:] == [
            "input_audio_buffer.speech_started",
            delta,
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            delta,
            "conversation.item.input_audio_transcription.completed",
        ]
        started, stopped = talk.events[1], talk.events[3]
        assert (started.audio_start_ms, stopped.audio_end_ms) == (pytest.approx(200, abs=2), pytest.approx(1000, abs=2))
        items = {getattr(event, "item_id", None) or event.item.id for event in talk.events[1:]}
        assert items == {completed.item_id}, "the item that was announced is the one that is committed"
        deltas = "".join(event.delta for event in talk.events if event.type == delta)
        assert deltas == completed.transcript == "! 0.8 seconds"
        assert completed.usage.type == "duration" and completed.usage.seconds == pytest.approx(0.8, abs=0.01)
        assert len({event.event_id for event in talk.events}) == len(talk.events)


async def test_manual_commits_follow_each_other(talking_live):
    async with talking_live(**TRANSCRIBE) as talk:
        await talk.connection.session.update(session=MANUAL)
        assert (await talk.until("session.updated")).session.audio.input.turn_detection is None
        items = []
        for seconds in (0.5, 1.0):
            await talk.append(seconds)
            await talk.connection.input_audio_buffer.commit()
            items.append(await talk.until("input_audio_buffer.committed"))
            completed = await talk.until("conversation.item.input_audio_transcription.completed")
            assert completed.transcript == f"{seconds} seconds"
        assert [item.previous_item_id for item in items] == [None, items[0].item_id]


@pytest.mark.parametrize("type", ["audio/pcm", "audio/pcmu", "audio/pcma"])
async def test_formats_and_samples_that_arrive_in_halves(talking_live, type):
    """One second in pieces of 333 bytes is one second, whatever a sample's width."""
    second = b"\x10\x02" * 24_000 if type == "audio/pcm" else b"\xd5" * 8_000
    async with talking_live(**TRANSCRIBE) as talk:
        input = {"format": {"type": type}, "turn_detection": None}
        await talk.connection.session.update(session={"type": "transcription", "audio": {"input": input}})
        updated = await talk.until("session.updated")
        assert updated.session.audio.input.format.type == type
        for start in range(0, len(second), 333):
            audio = base64.b64encode(second[start : start + 333]).decode()
            await talk.connection.input_audio_buffer.append(audio=audio)
        await talk.connection.input_audio_buffer.commit()
        completed = await talk.until("conversation.item.input_audio_transcription.completed")
        assert completed.transcript == "1.0 seconds"


async def test_clearing_forgets(talking_live):
    async with talking_live(**TRANSCRIBE) as talk:
        await talk.connection.input_audio_buffer.clear()
        await talk.until("input_audio_buffer.cleared")
        await talk.connection.session.update(session=MANUAL)
        await talk.append(0.5)
        await talk.connection.input_audio_buffer.clear()
        await talk.until("input_audio_buffer.cleared")
        await talk.connection.input_audio_buffer.commit(event_id="mine")
        error = await talk.error()
        assert (error.code, error.event_id) == ("input_audio_buffer_commit_empty", "mine")
        await talk.append(0.3)
        await talk.connection.input_audio_buffer.commit()
        assert (await talk.until("input_audio_buffer.committed")).item_id


async def test_a_session_is_patched_field_by_field(talking_live):
    async with talking_live(**TRANSCRIBE) as talk:
        detection = {"type": "server_vad", "silence_duration_ms": 900}
        input = {"turn_detection": detection, "transcription": {"model": "ear", "language": "en"}}
        await talk.connection.session.update(session={"type": "transcription", "audio": {"input": input}})
        session = (await talk.until("session.updated")).session
        found = session.audio.input.turn_detection
        assert (found.silence_duration_ms, found.threshold, found.prefix_padding_ms) == (900, 0.5, 300)
        patch = {"audio": {"input": {"transcription": {"prompt": "names"}}}}
        await talk.connection.session.update(session=patch)
        session = (await talk.until("session.updated")).session
        transcription = session.audio.input.transcription
        assert (transcription.model, transcription.language, transcription.prompt) == ("ear", "en", "names")
        assert session.audio.input.turn_detection.silence_duration_ms == 900


async def test_a_sessions_changes_reach_the_running_job_or_are_refused(talking_live):
    async with talking_live(**TRANSCRIBE) as talk:
        await talk.append(0.1)
        bad = {"audio": {"input": {"transcription": {"language": "xx"}}}}
        await talk.connection.session.update(session=MANUAL)
        await talk.until("session.updated")
        await talk.append(0.4)
        await talk.connection.input_audio_buffer.commit()
        completed = await talk.until("conversation.item.input_audio_transcription.completed")
        assert completed.transcript == "0.4 seconds"
        await talk.connection.session.update(session=bad)  # the fake ear ends with an error
        assert "language" in (await talk.error()).message


async def test_the_names_of_the_beta_are_understood(talking_live):
    async with talking_live(**TRANSCRIBE) as talk:
        old = {"input_audio_format": "g711_ulaw", "turn_detection": None, "input_audio_transcription": {"model": "ear"}}
        await talk.connection.session.update(session=old)
        session = (await talk.until("session.updated")).session
        assert session.audio.input.format.type == "audio/pcmu"
        assert session.audio.input.turn_detection is None
        assert session.audio.input.transcription.model == "ear"


async def test_a_model_that_only_listens_makes_a_transcription(talking_live):
    async with talking_live(model="ear") as talk:
        assert talk.events[0].session.type == "transcription"


async def test_sound_sent_at_once_waits_for_the_engine_not_in_memory(talking_live, fake):
    """Three minutes in one go: nothing is lost, and no more than a minute is posted ahead of the engine."""
    async with talking_live(**TRANSCRIBE) as talk:
        await talk.connection.session.update(session=MANUAL)
        for _ in range(6):
            await talk.append(30.0)
        await talk.connection.input_audio_buffer.commit()
        completed = await talk.until("conversation.item.input_audio_transcription.completed")
        assert completed.transcript == "180.0 seconds"
        assert fake.opened[0].inbox.empty()
