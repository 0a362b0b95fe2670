"""Answers on a socket: written by one model, said by another, stopped and cut to the word."""

from __future__ import annotations

import asyncio
import base64

import pytest

pytestmark = pytest.mark.anyio

REPLY = "Good morning. How are you?"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def ask(text: str = "Hello?") -> dict:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


async def test_an_answer_is_said_in_the_order_of_the_protocol(talking_live):
    async with talking_live(model="chat") as talk:
        assert talk.events[0].session.type == "realtime"
        await talk.connection.conversation.item.create(item=ask())
        await talk.connection.response.create()
        done = await talk.until("response.done")
        kinds = list(dict.fromkeys(talk.types()[1:]))
        assert kinds == [
            "conversation.item.added",
            "conversation.item.done",
            "response.created",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_audio_transcript.delta",
            "response.output_audio.delta",
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.done",
        ]
        assert done.response.status == "completed"
        assert done.response.output[0].content[0].transcript == REPLY
        usage = done.response.usage
        details = usage.output_token_details
        assert (usage.input_tokens, details.text_tokens, details.audio_tokens) == (3, 5, 10), "half a second of sound"
        assert (usage.output_tokens, usage.total_tokens) == (15, 18)
        deltas = [event for event in talk.events if event.type == "response.output_audio_transcript.delta"]
        assert "".join(event.delta for event in deltas) == REPLY
        words = [word for event in deltas for word in event.words]
        assert [word["word"] for word in words] == REPLY.split()
        assert [word["start"] for word in words] == [0.0, 0.1, 0.2, 0.3, 0.4], "the second sentence goes on in time"
        audio = b"".join(
            base64.b64decode(event.delta) for event in talk.events if event.type == "response.output_audio.delta"
        )
        assert audio == b"\1\2" * 2400 * 5


async def test_text_alone(talking_live, fake):
    async with talking_live(model="chat") as talk:
        await talk.connection.session.update(session={"type": "realtime", "instructions": "Be kind."})
        await talk.connection.conversation.item.create(item=ask())
        await talk.connection.response.create(response={"output_modalities": ["text"], "max_output_tokens": 1})
        done = await talk.until("response.done")
        assert done.response.output[0].content[0].text == REPLY
        assert done.response.status == "incomplete"
        assert done.response.status_details.reason == "max_output_tokens"
        assert not [type for type in talk.types() if "audio" in type]
        assert fake.opened[0].ask.messages == [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hello?"},
        ]


async def test_the_conversation_goes_on(talking_live, fake):
    async with talking_live(model="chat") as talk:
        for _ in range(2):
            await talk.connection.conversation.item.create(item=ask())
            await talk.connection.response.create(response={"output_modalities": ["text"]})
            await talk.until("response.done")
        assert [message["role"] for message in fake.opened[1].ask.messages] == ["user", "assistant", "user"]
        # out of band: nothing of it stays, and only its own input counts
        await talk.connection.response.create(
            response={"conversation": "none", "input": [ask("Alone?")], "output_modalities": ["text"]}
        )
        await talk.until("response.done")
        assert [message["content"] for message in fake.opened[2].ask.messages] == ["Alone?"]
        await talk.connection.response.create(response={"output_modalities": ["text"]})
        await talk.until("response.done")
        assert len(fake.opened[3].ask.messages) == 4


async def test_how_freely_the_model_answers(talking_live, fake):
    """The session's temperature, unless the answer has its own; the fastest voice that files have, sockets have."""
    async with talking_live(model="chat") as talk:
        await talk.connection.conversation.item.create(item=ask())
        for session, response, expected in [
            ({}, {}, 0.8),
            ({"temperature": 0}, {}, 0),
            ({}, {"temperature": 1.5}, 1.5),
        ]:
            session = {"type": "realtime", "audio": {"output": {"speed": 4}}, **session}
            await talk.connection.session.update(session=session)
            await talk.connection.response.create(response={"output_modalities": ["text"], **response})
            await talk.until("response.done")
            assert fake.opened[-1].ask.sampling.temperature == expected
        await talk.connection.session.update(session={"type": "realtime", "temperature": 3})
        assert (await talk.error()).param == "session.temperature"


async def test_cancelling_tells_every_end(talking_live, fake):
    async with talking_live(model="chat") as talk:
        await talk.connection.session.update(session={"type": "realtime", "audio": {"output": {"model": "slow"}}})
        await talk.connection.conversation.item.create(item=ask())
        await talk.connection.response.create()
        await talk.until("response.output_audio.delta")
        await talk.connection.response.create(event_id="again")
        error = await talk.error()
        assert (error.code, error.event_id) == ("conversation_already_has_active_response", "again")
        await talk.connection.response.cancel()
        done = await talk.until("response.done")
        assert (done.response.status, done.response.status_details.reason) == ("cancelled", "client_cancelled")
        ends = talk.types()[-6:]
        assert ends[0] == "response.output_audio.done" and "response.output_item.done" in ends
        assert done.response.output[0].status == "incomplete"
        assert not fake.running, "nothing goes on"
        usage = done.response.usage
        heard = talk.types().count("response.output_audio.delta")
        assert usage.output_token_details.audio_tokens == 2 * heard, "what was heard counts"
        assert (usage.input_tokens, usage.output_token_details.text_tokens) == (3, 5), "the chat model had ended"
        await talk.connection.response.create()
        assert (await talk.until("response.done")).response.status == "completed"


async def test_who_is_stopped_while_writing_is_told_what_it_cost(talking_live, fake):
    """The chat model's own count never comes: what was asked and written is counted in its tokens."""
    async with talking_live(model="slow chat") as talk:
        await talk.connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
        await talk.connection.conversation.item.create(item=ask())
        await talk.connection.response.create()
        await talk.until("response.output_text.delta")
        await talk.connection.response.cancel()
        done = (await talk.until("response.done")).response
        written = done.output[0].content[0].text
        assert done.status == "cancelled" and REPLY.startswith(written)
        assert (done.usage.input_tokens, done.usage.output_tokens) == (17, len(written))


async def test_a_voice_alone_counts_its_sound(talking_live):
    async with talking_live(model="voice") as talk:
        await talk.connection.conversation.item.create(item=ask("One two."))
        await talk.connection.response.create()
        usage = (await talk.until("response.done")).response.usage
        assert (usage.input_tokens, usage.output_tokens, usage.output_token_details.audio_tokens) == (0, 4, 4)


async def test_truncating_cuts_the_text_where_playback_stopped(talking_live, fake):
    async with talking_live(model="chat") as talk:
        await talk.connection.conversation.item.create(item=ask())
        await talk.connection.response.create()
        item = (await talk.until("response.done")).response.output[0].id
        await talk.connection.conversation.item.truncate(item_id=item, content_index=0, audio_end_ms=501)
        assert "500 ms" in (await talk.error()).message
        await talk.connection.conversation.item.truncate(item_id=item, content_index=0, audio_end_ms=320)
        truncated = await talk.until("conversation.item.truncated")
        assert (truncated.item_id, truncated.audio_end_ms) == (item, 320)
        await talk.connection.conversation.item.retrieve(item_id=item)
        assert (await talk.until("conversation.item.retrieved")).item.content[0].transcript == "Good morning. How"
        await talk.connection.conversation.item.create(item=ask("And?"))
        await talk.connection.response.create(response={"output_modalities": ["text"]})
        await talk.until("response.done")
        assert fake.opened[-1].ask.messages[1]["content"] == "Good morning. How", "the model knows what was heard"


async def test_a_voice_that_does_not_know_when_its_words_are_said(talking_live):
    """Half of a sentence's sound is half of its letters, in whole words."""
    async with talking_live(model="chat") as talk:
        await talk.connection.session.update(session={"type": "realtime", "audio": {"output": {"speed": 1.5}}})
        await talk.connection.conversation.item.create(item=ask())
        await talk.connection.response.create()
        item = (await talk.until("response.done")).response.output[0].id
        deltas = [event.delta for event in talk.events if event.type == "response.output_audio_transcript.delta"]
        assert deltas == ["Good morning. ", "How are you?"]
        await talk.connection.conversation.item.truncate(item_id=item, content_index=0, audio_end_ms=400)
        await talk.until("conversation.item.truncated")
        await talk.connection.conversation.item.retrieve(item_id=item)
        assert (await talk.until("conversation.item.retrieved")).item.content[0].transcript == "Good morning. How are"


async def test_speaking_over_an_answer_stops_it(talking_live):
    async with talking_live(model="chat") as talk:
        await talk.connection.session.update(session={"type": "realtime", "audio": {"output": {"model": "slow"}}})
        await talk.connection.conversation.item.create(item=ask())
        await talk.connection.response.create()
        await talk.until("response.output_audio.delta")
        await talk.append(0.3, level=0.5)
        done = await talk.until("response.done")
        assert (done.response.status, done.response.status_details.reason) == ("cancelled", "turn_detected")
        await talk.append(0.5)
        await talk.until("conversation.item.input_audio_transcription.completed")
        assert (await talk.until("response.done")).response.status == "completed", "and is then answered"


async def test_the_voice_loop_answers_what_was_said(talking_live, fake):
    async with talking_live(model="chat") as talk:
        await talk.append(0.3, level=0.5)
        await talk.append(0.5)
        done = await talk.until("response.done")
        assert done.response.output[0].content[0].transcript == REPLY
        chat = next(opened for opened in fake.opened if opened.task == "chat")
        assert chat.ask.messages == [{"role": "user", "content": "! 0.8 seconds"}]
        assert {opened.served.name for opened in fake.opened} == {"ear", "chat", "voice"}


async def test_a_committed_utterance_is_awaited(talking_live, fake):
    async with talking_live(model="chat") as talk:
        await talk.connection.session.update(session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
        await talk.append(0.5)
        await talk.connection.input_audio_buffer.commit()
        await talk.until("input_audio_buffer.committed")
        await talk.connection.response.create()
        assert (await talk.until("response.done")).response.status == "completed"
        chat = next(opened for opened in fake.opened if opened.task == "chat")
        assert chat.ask.messages == [{"role": "user", "content": "0.5 seconds"}]


async def test_a_voice_as_the_sessions_model_reads_aloud(talking_live, fake):
    async with talking_live(model="voice") as talk:
        await talk.connection.response.create(
            response={"conversation": "none", "input": [ask("Read this.")], "metadata": {"my": "tag"}}
        )
        done = await talk.until("response.done")
        assert done.response.output[0].content[0].transcript == "Read this."
        assert done.response.metadata == {"my": "tag"}
        assert [opened.task for opened in fake.opened] == ["speak"]


async def test_an_answer_to_nothing_fails_and_says_so(talking_live):
    async with talking_live(model="chat") as talk:
        await talk.connection.response.create()
        done = await talk.until("response.done")
        assert done.response.status == "failed"
        assert done.response.status_details.error.code == "empty_conversation"


async def test_leaving_stops_the_answer(talking_live, fake):
    async with talking_live(model="chat") as talk:
        await talk.connection.session.update(session={"type": "realtime", "audio": {"output": {"model": "slow"}}})
        await talk.connection.conversation.item.create(item=ask())
        await talk.connection.response.create()
        await talk.until("response.output_audio.delta")
    for _ in range(1000):
        if not fake.running:
            break
        await asyncio.sleep(0.01)
    assert not fake.running
