"""Reads requests of OpenAI's API and writes its replies: completions, chat completions, models, errors."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response

from ..common.wire.json_text import to_json
from .engine import End, Piece, Request, Sampling
from .errors import Refused
from .models import LanguageModel
from .slots import Version

# Fields that would change the reply and that this server cannot follow. All other unknown fields are ignored.
_UNSUPPORTED = (
    "best_of", "echo", "frequency_penalty", "functions", "function_call", "logit_bias", "n", "presence_penalty",
    "suffix", "tools", "tool_choice", "response_format", "audio", "modalities", "prediction",
)  # fmt: skip
_HARMLESS = {"n": 1, "best_of": 1, "response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"]}
_MOST_STOPS, _MOST_LOGPROBS = 4, 20
_MAX_TOKENS = 64  # of a reply if the request does not say; fewer if the context ends before


class JsonResponse(JSONResponse):
    """A reply that any parser reads: without NaN, Infinity and halves of UTF-16 pairs."""

    def render(self, content: Any) -> bytes:
        return to_json(content, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def error_response(status: int, message: str, code: str = "", param: str | None = None) -> Response:
    """Return an error in the shape of OpenAI's API."""
    kinds = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
             404: "not_found_error", 408: "invalid_request_error", 413: "invalid_request_error",
             429: "rate_limit_error"}  # fmt: skip
    error = {"message": message, "type": kinds.get(status, "server_error"), "param": param, "code": code or None}
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return JsonResponse({"error": error}, status, headers)


def refused_by_guard(status: int, error: str, fix: str = "") -> Response:
    """Return the refusal of a guard in the same shape."""
    fix = "send a shorter body, or start ps-serve with a larger serve.max_body_bytes" if status == 413 else fix
    return error_response(status, f"{error}: {fix}" if fix else error)


@dataclass(frozen=True)
class ClientRequest:
    """A request of a client with the options of its reply. The engine checks whether the version is here."""

    request: Request
    is_chat: bool
    is_streamed: bool
    wants_usage: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


class Requests:
    """Reads the requests to one model.

    `names`: the valid values of the field `model`, besides names of versions. `max_tokens`: limit of a reply.
    """

    def __init__(self, task: Any, names: Collection[str], kind: LanguageModel, max_tokens: int) -> None:
        self._task, self._names, self._max_tokens = task, names, max_tokens
        self._context, self._vocabulary = kind.context, kind.vocabulary

    def read(self, body: Any, is_chat: bool) -> ClientRequest:
        """Read the JSON of a request. Raises Refused, with the name of the field."""
        if not isinstance(body, dict):
            raise Refused(400, "the body is not a JSON object", "invalid_json")
        for name in _UNSUPPORTED:
            if body.get(name) and body[name] != _HARMLESS.get(name):
                raise Refused(400, f"{name} is not supported here; leave it out", "unsupported_parameter", name)
        prompt = self._chat(body) if is_chat else self._prompt(body)
        if self._vocabulary is not None and max(prompt, default=0) >= self._vocabulary:
            message = f"prompt has token {max(prompt)}, and this model's tokens are 0 to {self._vocabulary - 1}"
            raise Refused(400, message, "invalid_value", "prompt")
        if not prompt:
            name = "messages" if is_chat else "prompt"
            raise Refused(400, f"{name} is empty: a model needs a token to begin with", "invalid_value", name)
        stream, options = _switch(body, "stream"), body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise Refused(400, "stream_options is not an object", "invalid_type", "stream_options")
        limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        room = self._context - len(prompt)
        if room < 1:
            message = f"the prompt has {len(prompt)} tokens, and the context {self._context}: no reply fits"
            raise Refused(400, message, "context_length_exceeded", "messages" if is_chat else "prompt")
        default = min(_MAX_TOKENS, room, self._max_tokens)
        most = default if body.get(limit) is None else _number(body, limit, 0, 1, self._max_tokens, whole=True)
        request = Request(tuple(prompt), int(most), self._sampling(body, is_chat), _stops(body), self._version(body))
        return ClientRequest(request, is_chat, stream, _switch(options, "include_usage"))

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt", "")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._encoded(self._task.encode, prompt, "prompt")
        if isinstance(prompt, list) and all(type(token) is int and 0 <= token < 2**31 for token in prompt):
            return prompt
        raise Refused(400, "prompt is a text or a list of tokens; several prompts are several requests",
                      "invalid_type", "prompt")  # fmt: skip

    def _chat(self, body: dict[str, Any]) -> list[int]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused(400, "messages is a list of objects with role and content", "invalid_type", "messages")
        checked = []
        for message in messages:
            role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
            if isinstance(content, list):  # parts of text
                parts = [part.get("text") if isinstance(part, dict) else None for part in content]
                texts = [part for part in parts if isinstance(part, str)]
                content = "".join(texts) if len(texts) == len(parts) else None
            if not isinstance(role, str) or not isinstance(content, str):
                message = "a message is {role, content}, and its content is text"
                raise Refused(400, message, "invalid_type", "messages")
            checked.append({"role": role, "content": content})
        if callable(getattr(self._task, "chat", None)):
            return self._encoded(self._task.chat, checked, "messages")
        text = "".join(f"{message['role']}: {message['content']}\n" for message in checked)
        return self._encoded(self._task.encode, f"{text}assistant: ", "messages")

    def _encoded(self, encode: Callable[[Any], Any], text: Any, param: str) -> list[int]:
        try:
            return [int(token) for token in encode(text)]
        except Exception as error:  # the task's own: a character or a role that it does not have, most often
            message = f"{param} cannot be encoded: {type(error).__name__}: {error}"
            raise Refused(400, message, "invalid_value", param) from None

    def _sampling(self, body: dict[str, Any], is_chat: bool) -> Sampling:
        seed = body.get("seed")
        if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63):
            raise Refused(400, "seed is not a whole number of 64 bits", "invalid_type", "seed")
        if is_chat:
            name, is_on = "top_logprobs", _switch(body, "logprobs")
        else:
            name, is_on = "logprobs", body.get("logprobs") is not None and body["logprobs"] is not False
        num = int(_number(body, name, 0, 0, _MOST_LOGPROBS, whole=True)) if is_on else None
        return Sampling(
            temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
            top_p=_number(body, "top_p", 1.0, 0.0, 1.0),
            top_k=int(_number(body, "top_k", 0, 0, 2**31, whole=True)),
            seed=seed,
            num_logprobs=num,
        )

    def _version(self, body: dict[str, Any]) -> str:
        model = body.get("model", "live")
        if not isinstance(model, str):
            raise Refused(400, "model is not a name", "invalid_type", "model")
        run, at, version = model.rpartition("@")
        if at:
            return f"{run}:{version}"
        if model in self._names:
            return ""
        known = ", ".join(sorted(self._names))
        message = f"no model {model[:80]} is here; there are: {known}, RUN@INCARNATION.VERSION"
        raise Refused(404, message, "model_not_found", "model")


def _switch(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise Refused(400, f"{name} is true or false", "invalid_type", name)


def _number(body: dict[str, Any], name: str, default: float, least: float, most: float, whole: bool = False) -> float:
    value = body.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        message = f"{name} is {str(value)[:40]}: it is {kind} from {least:g} to {most:g}"
        raise Refused(400, message, "invalid_value", name)
    return float(value)


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    stops = body.get("stop")
    stops = [stops] if isinstance(stops, str) else stops or []
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise Refused(400, f"stop is a text, or a list of at most {_MOST_STOPS} texts", "invalid_value", "stop")
    return tuple(stops)


class Replies:
    """Writes the reply to one request, as chunks of a stream or as one object."""

    def __init__(self, client: ClientRequest, model: str, decode: Callable[[list[int]], str]) -> None:
        self._client, self._model, self._decode = client, model, decode
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._length = 0  # characters of the reply

    def chunk(self, piece: Piece, version: Version) -> dict[str, Any]:
        """Return the chunk of a stream for a piece of text."""
        message = {"content": piece.text} if self._length else {"role": "assistant", "content": piece.text}
        choice = self._choice(None, self._of(piece), piece.text, {"delta": message})
        self._length += len(piece.text)
        return self._frame([choice], version, is_chunk=True)

    def last_chunks(self, end: End) -> list[dict[str, Any]]:
        """Return the chunks that end a stream: the reason of the end, and the usage if the client requested it."""
        delta = {"content": end.text} if end.text else {}
        choice = self._choice(end.reason, None, end.text, {"delta": delta})
        frame = self._frame([choice], end.version, is_chunk=True)
        if end.num_swaps:
            frame["swaps"] = end.num_swaps
        usage = self._frame([], end.version, is_chunk=True) | {"usage": self._usage(end)}
        return [frame, usage] if self._client.wants_usage else [frame]

    def add(self, piece: Piece) -> None:
        """Add a piece of text to the reply."""
        self._texts.append(piece.text)
        self._logprobs.append(self._of(piece))
        self._length += len(piece.text)

    def whole(self, end: End) -> dict[str, Any]:
        """Return the whole reply."""
        text = "".join(self._texts) + end.text
        message = {"role": "assistant", "content": text}
        choice = self._choice(end.reason, _joined(self._logprobs), text, {"message": message})
        frame = self._frame([choice], end.version, is_chunk=False) | {"usage": self._usage(end)}
        return frame | ({"swaps": end.num_swaps} if end.num_swaps else {})

    def _choice(self, reason: str | None, logprobs: Any, text: str, chat: dict[str, Any]) -> dict[str, Any]:
        content = chat if self._client.is_chat else {"text": text}
        return {"index": 0, "finish_reason": reason, "logprobs": logprobs, **content}

    def _frame(self, choices: list[dict[str, Any]], version: Version, is_chunk: bool) -> dict[str, Any]:
        chat, client = self._client.is_chat, self._client
        kind = f"chat.completion{'.chunk' if is_chunk else ''}" if chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{client.id}", "object": kind, "created": client.created,
            "model": self._model, "system_fingerprint": version.fingerprint, "choices": choices,
        }  # fmt: skip

    def _usage(self, end: End) -> dict[str, int]:
        num_prompt = len(self._client.request.prompt)
        total = num_prompt + end.num_tokens
        return {"prompt_tokens": num_prompt, "completion_tokens": end.num_tokens, "total_tokens": total}

    def _of(self, piece: Piece) -> dict[str, Any] | None:
        chosen = piece.chosen
        if chosen.logprob is None:
            return None
        if self._client.is_chat:
            return {"content": [self._entry(chosen.token, chosen.logprob) | {
                "top_logprobs": [self._entry(token, logprob) for token, logprob in chosen.likeliest]
            }]}  # fmt: skip
        return {
            "tokens": [self._decode([chosen.token])], "token_logprobs": [chosen.logprob],
            "top_logprobs": [{self._decode([token]): logprob for token, logprob in chosen.likeliest}],
            "text_offset": [self._length],
        }  # fmt: skip

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}


def _joined(parts: list[Any]) -> dict[str, Any] | None:
    """Return the log probabilities of all pieces as one object, or None without any."""
    if not parts or parts[0] is None:
        return None
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]}


def described_version(version: Version) -> dict[str, Any]:
    """Return the name of a version (RUN@INCARNATION.VERSION), its parts and its age."""
    age_s = time.monotonic() - version.fetched_at
    return {
        "model": version.model, "run": version.run, "incarnation": version.incarnation,
        "version": version.number, "age_s": round(age_s, 3),
    }  # fmt: skip


def models(names: list[str], versions: list[Version]) -> dict[str, Any]:
    """Return the list of models: the names of the newest version, and the name of each version."""
    found = [described_version(version) for version in versions]
    entries = [*({"id": name} for name in names), *({"id": entry.pop("model")} | entry for entry in found)]
    common = {"object": "model", "created": 0, "owned_by": "paramserver"}
    return {"object": "list", "data": [entry | common for entry in entries]}
