"""Chat templates: a conversation becomes the text the model was trained on.

A template is a small program that comes with the model. It runs in jinja2's sandbox (`core.text.sandbox`) under the
rules that template authors write for: transformers' `apply_chat_template`. What users send is data to it, never
template text.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta

from polymux.core.errors import InvalidRequest, ModelError
from polymux.core.text.sandbox import Exhausted, Sandbox, limited

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """One model's templates: `sources` by name, "default" for chats and perhaps "tool_use" for chats with tools.

    `special_tokens` (bos_token, eos_token, ...) can be written by the template. `sees`: contents are lists of parts,
    among them {"type": "image"} and {"type": "video"}.
    """

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str], *, sees: bool = False) -> None:
        environment = Sandbox()
        self._sources = sources
        self._special_tokens = special_tokens
        self._sees = sees
        self._templates: dict[str, jinja2.Template] = {}
        self._variables: dict[str, set[str]] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                self._variables[name] = jinja2.meta.find_undeclared_variables(environment.parse(source))
            except jinja2.TemplateError as error:
                raise ModelError(f"The chat template {name!r} is not valid: {error}") from error
        self._knows_developer = any("developer" in source for source in sources.values())

    @classmethod
    def load(cls, files: ModelFiles, special_tokens: dict[str, str], *, sees: bool = False) -> ChatTemplate | None:
        """The model's templates, None when it has none.

        From chat_template.jinja and additional_chat_templates/*.jinja, else from chat_template.json or
        tokenizer_config.json (one string or a list of named ones). Raises `ModelError` for what is no template.
        """
        sources = {
            path.stem: path.read_text("utf-8") for path in files.folder.glob("additional_chat_templates/*.jinja")
        }
        if files.has("chat_template.jinja"):
            sources["default"] = files.path("chat_template.jinja").read_text("utf-8")
        for name in ("chat_template.json", "tokenizer_config.json"):
            sources = sources or named_templates(files.json(name).get("chat_template"))
        return cls(sources, special_tokens, sees=sees) if sources else None

    def source(self, *, tools: bool = False) -> str:
        """The text of the template for chats, with tools or without."""
        return self._sources.get("tool_use" if tools else "default") or self._sources.get("default", "")

    def knows(self, variable: str) -> bool:
        """Whether the template for chats asks for a variable."""
        return variable in self._variables.get("default", ())

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
    ) -> str:
        """The prompt, up to where the assistant begins to speak.

        `options` are variables of the template's own (enable_thinking, ...). Raises `InvalidRequest` naming the part
        for a message that a text model cannot read, for tools or options that the template does not use, and for
        what the template itself refuses.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(f"This model has no default chat template, only {sorted(self._templates)}.")
        self._check_use(name, tools, options or {})
        variables = self._special_tokens | (options or {})
        conversation = [self._read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        try:
            return limited(
                self._templates[name].generate(
                    messages=conversation, tools=tools or None, documents=None, add_generation_prompt=True, **variables
                )
            )
        except Exhausted as error:
            raise InvalidRequest(f"Rendering the conversation takes too much: {error}", param="messages") from error
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as error:
            raise InvalidRequest(
                f"The model's chat template refuses this conversation: {error}", param="messages"
            ) from error

    def _check_use(self, name: str, tools: list[dict[str, Any]] | None, options: dict[str, Any]) -> None:
        known = self._variables[name]
        if tools and "tools" not in known:
            raise InvalidRequest("This model's chat template does not know tools.", param="tools")
        unknown = sorted(option for option in options if option in RESERVED or option not in known)
        if unknown:
            raise InvalidRequest(
                f"This model's chat template has no option {', '.join(unknown)}.", param="chat_template_kwargs"
            )

    def _read_message(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        """The message as templates expect it: no nulls, content as one string, tool arguments as objects."""
        read = {key: value for key, value in message.items() if value is not None}
        if read.get("role") == "developer" and not self._knows_developer:
            read["role"] = "system"
        content = read.get("content")
        if self._sees and isinstance(content, str):
            read["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not self._sees:
            read["content"] = join_parts(content, f"{where}.content")
        if "tool_calls" in read:
            calls = enumerate(read["tool_calls"])
            read["tool_calls"] = [read_call(call, f"{where}.tool_calls[{i}]") for i, call in calls]
        return read


def named_templates(entry: Any) -> dict[str, str]:
    """tokenizer_config.json's `chat_template`: absent, one template, or a list of {"name", "template"}."""
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    try:
        return {item["name"]: item["template"] for item in entry}
    except (TypeError, KeyError) as error:
        raise ModelError("tokenizer_config.json: chat_template must be a text or a list of named texts") from error


def join_parts(parts: list[Any], where: str) -> str:
    """Content parts as one text: what the text parts hold, joined as they are."""
    texts = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if isinstance(text, str):
            texts.append(text)
        elif kind in ("text", "refusal"):
            raise InvalidRequest(f"{where}[{i}].{kind} must be a text.", param=f"{where}[{i}]")
        else:
            raise InvalidRequest(
                f"{where}[{i}] is of type {kind!r}; this model reads text only.", param=f"{where}[{i}]"
            )
    return "".join(texts)


def read_call(call: Any, where: str) -> Any:
    """A tool call with its arguments as an object: OpenAI writes them as JSON text, templates expect the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise InvalidRequest(f"{where}.function.arguments is not valid JSON: {error}", param=where) from error
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.function.arguments must be a JSON object.", param=where)
    return {**call, "function": {**function, "arguments": arguments}}
