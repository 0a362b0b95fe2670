"""A model's habits: how it thinks before it answers and how it calls tools, as its own files show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polymux.core.errors import InvalidRequest
from polymux.core.generation.work import Guidance, Thought
from polymux.core.tasks import Chat
from polymux.core.text.calls import HERMES, MAX_TOOLS, CallFormat, Tool, find_format
from polymux.core.text.grammar import Grammars, after_thought, write_grammar
from polymux.core.text.parts import PlainReader, Reader, ThoughtReader
from polymux.core.text.template import ChatTemplate
from polymux.core.text.tokenizer import Tokenizer
from polymux.core.text.toolprompt import introduce

MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<reasoning>", "</reasoning>"),
)
"""What models put around a thought. A pair counts when each mark is one token of the model."""

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates let a thought be left out."""


@dataclass(frozen=True)
class Marks:
    """The two marks around a thought and their ids."""

    begin: str
    end: str
    begin_id: int
    end_id: int


@dataclass(frozen=True)
class Manner:
    """How one conversation is answered: what guides the model, and who reads what it says."""

    guidance: Guidance | None
    calls: CallFormat | None
    marks: Marks | None
    inside: bool = False

    def open_reader(self) -> Reader:
        reader: Reader = self.calls.open_reader() if self.calls is not None else PlainReader()
        if self.marks is not None:
            reader = ThoughtReader(self.marks.begin, self.marks.end, reader, inside=self.inside)
        return reader


class Habits:
    """Of one model. `kept` are special tokens whose text readers must see."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        grammars: Grammars,
        formats: Sequence[CallFormat] = (),
    ) -> None:
        """`formats`: ways to call tools that plugins bring."""
        self._tokenizer = tokenizer
        self._template = template
        self._grammars = grammars
        self.marks = find_marks(tokenizer)
        self.calls = find_format(template.source(tools=True), formats) if template is not None else None
        self.wordless = template is not None and "tools" not in template.source(tools=True)
        """The template knows no tools: they are shown in words."""
        if self.wordless:
            self.calls = HERMES
        texts = [self.marks.begin, self.marks.end] if self.marks is not None else []
        if self.calls is not None:
            texts += self.calls.marks
        self.kept = frozenset(id for text in texts if text and (id := tokenizer.find(text)) is not None)

    def template_options(self, ask: Chat) -> dict[str, Any]:
        """The template's variables, those that an effort sets among them.

        Raises `InvalidRequest` for an effort that the model has no means for.
        """
        if ask.effort is None or self._template is None:
            return ask.template_options
        if self._template.knows("reasoning_effort"):
            return {"reasoning_effort": ask.effort, **ask.template_options}
        for switch in SWITCHES:
            if self._template.knows(switch):
                return {switch: ask.effort not in ("none", "minimal"), **ask.template_options}
        if ask.effort == "none" and self.marks is None:
            return ask.template_options
        raise InvalidRequest("This model has no setting for how much it thinks.", param="reasoning_effort")

    def render(self, ask: Chat, template: ChatTemplate) -> str:
        """The prompt. Raises `InvalidRequest`."""
        messages, tools = ask.messages, self.tools_shown(ask)
        if self.wordless:
            messages, tools = introduce(messages, tools), None
        return template.render(messages, tools=tools, options=self.template_options(ask))

    def tools_shown(self, ask: Chat) -> list[dict[str, Any]] | None:
        """The tools that the template is given: none when none may be called. Raises `InvalidRequest`."""
        if not ask.tools or (ask.tool_choice == "none" and ask.tool is None):
            return None
        if self.calls is None:
            raise InvalidRequest("This model does not call tools in a form that is known here.", param="tools")
        if len(ask.tools) > MAX_TOOLS:
            raise InvalidRequest(f"At most {MAX_TOOLS} tools are allowed.", param="tools")
        return ask.tools

    def answer(self, ask: Chat, prompt: str) -> Manner:
        """How to answer a conversation that was rendered as `prompt`. Raises `InvalidRequest`.

        Grammars are compiled here to be refused early; the engine compiles them again, from the same text.
        """
        marks, inside = self._expect_thought(prompt)
        if ask.thought_budget is not None and self.marks is None:
            raise InvalidRequest("This model does not think before it answers.", param="thinking_budget")
        grammar = write_grammar(ask.format) if ask.format is not None else None
        if grammar is not None:
            self._grammars.compile(grammar)
        calls = self.calls if self.tools_shown(ask) else None
        if calls is not None:
            grammar = self._write_calls(calls, ask, grammar)
            self._grammars.compile(grammar, "tools")
        thought = None
        if marks is not None and (grammar is not None or ask.thought_budget is not None):
            thought = Thought(begin=marks.begin_id, end=marks.end_id, inside=inside, budget=ask.thought_budget)
            grammar = after_thought(grammar) if grammar is not None else None
        guidance = Guidance(grammar=grammar, thought=thought) if grammar is not None or thought is not None else None
        return Manner(guidance, calls, marks, inside)

    def _expect_thought(self, prompt: str) -> tuple[Marks | None, bool]:
        """The marks of a thought that may come, and whether the prompt has opened it; some templates close it again."""
        end = prompt.rstrip()
        if self.marks is None or end.endswith(self.marks.end):
            return None, False
        return self.marks, end.endswith(self.marks.begin)

    def _write_calls(self, format: CallFormat, ask: Chat, answer: str | None) -> str:
        tools = [Tool.read(tool) for tool in ask.tools or ()]
        if len({tool.name for tool in tools}) < len(tools):
            raise InvalidRequest("Two tools have the same name.", param="tools")
        if ask.tool is not None:
            tools = [tool for tool in tools if tool.name == ask.tool]
            if not tools:
                raise InvalidRequest(f"There is no tool {ask.tool!r} among the tools.", param="tool_choice")
        return format.write(
            tools,
            self._tokenizer,
            forced=ask.tool is not None or ask.tool_choice == "required",
            parallel=ask.parallel_calls and ask.tool is None,
            answer=answer,
        )


def find_marks(tokenizer: Tokenizer) -> Marks | None:
    for begin, end in MARKS:
        begin_id, end_id = tokenizer.find(begin), tokenizer.find(end)
        if begin_id is not None and end_id is not None:
            return Marks(begin, end, begin_id, end_id)
    return None
