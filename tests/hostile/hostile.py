"""Hostile messages of a seed: fields by their rules (`fields.py`) in a message that is sound but for them, built from
nothing, or with bytes changed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct, Value

from .fields import kind_of

NUMBERS = [0, 1, 2, 3, 8, 31, 32, 33, 255, 4096, 65535, 65536, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**62,
           2**62 + 1, 2**63, 2**64 - 1]  # fmt: skip
REALS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e9, 2e9, 1e308, -1e308, float("inf"), float("-inf"), float("nan")]
# Names of code, files and commands; of things that there are, of ours; and texts that harm whoever shows them.
TEXTS = [
    "", "w", "raw", "bf16", "int8", "q4", "topk", "powersgd", "zip", "float32", "bfloat16", "os", "float128", "SGD",
    "adam", "AdamW", "LBFGS", "Optimizer", "RowwiseAdagrad", "lr", "betas", "foreach", "params", "sync", "async",
    "diloco", "linear", "gpt", "mnist", "digits", "ledger", "30s", "1epoch", "9" * 400, "os.system",
    "subprocess", "subprocess:Popen", "subprocess.py:Popen", "/usr/lib/python3/subprocess.py:Popen", "evil.py:Evil",
    "os.py:system", "paramserver.worker.tasks.linear", "__import__('os').system('true')", "$(true)", "; true",
    "../../etc/passwd", "/etc/passwd", "/proc/self/mem", "file:///etc/passwd", "~/.ssh/id_rsa", "a\nb", "a\0b",
    "\x1b[31m", "\u202e", "é" * 50, "%s%n", "{}", "{0.__class__}", "w" * 999, "w" * 100_000, "0" * 32, "0" * 64, "run",
]  # fmt: skip
ADDRESSES = [
    "", "127.0.0.1:1", "[::1]:1", "10.0.0.1:50051", "host:0", "host:65536", "host:-1", "host", ":1", "a b:1", "a@b:1",
    "unix:/run/docker.sock", "unix-abstract:x", "http://127.0.0.1:80/", "dns:///evil", "a\n:1", "/etc/passwd",
    "x" * 2000 + ":1", "xds:///a:1", "vsock:1:1", "169.254.169.254:80",
]  # fmt: skip
JSON = ['"evil.py:Evil"', "[" * 5000, "1e999", "NaN", "-1", "null", str(2**70), "{}", '"\\ud800"', "[]"]


class Hostile:
    """All of it follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def spoil(self, message: Message, most: int = 3) -> None:
        """Give some of its fields, or of those within it, values that they should not have."""
        for _ in range(self.random.randint(1, most)):
            self._spoil_one(message)

    def fill(self, message: Message, depth: int = 0) -> None:
        """Some of its fields, of whatever values."""
        fields = list(message.DESCRIPTOR.fields)
        for field in self.random.sample(fields, self.random.randint(0, min(4, len(fields)))):
            self._set(message, field, depth)

    def _spoil_one(self, message: Message) -> None:
        set_already = [
            value
            for field, value in message.ListFields()
            if field.type == FieldDescriptor.TYPE_MESSAGE and not field.is_repeated and _has_rules(field.message_type)
        ]
        if set_already and self.random.random() < 0.6:
            self._spoil_one(self.random.choice(set_already))
        elif fields := list(message.DESCRIPTOR.fields):
            self._set(message, self.random.choice(fields), 0)

    def _set(self, message: Message, field: Any, depth: int) -> None:
        if field.is_repeated:
            self._repeat(message, field, depth)
        elif field.type != FieldDescriptor.TYPE_MESSAGE:
            setattr(message, field.name, self.value(field))
        elif field.message_type.full_name == "google.protobuf.Struct":
            self._values(getattr(message, field.name), depth)
        else:
            getattr(message, field.name).SetInParent()
            if depth < 8:
                self.fill(getattr(message, field.name), depth + 1)

    def _repeat(self, message: Message, field: Any, depth: int) -> None:
        values = getattr(message, field.name)
        if self.random.random() < 0.3:
            message.ClearField(field.name)
        for _ in range(self.random.choice([0, 1, 2, 3, 70]) if depth < 4 else 1):
            if field.type != FieldDescriptor.TYPE_MESSAGE:
                values.append(self.value(field))
            elif field.message_type.GetOptions().map_entry:
                key, value = field.message_type.fields
                values[self.value(key)] = self.value(value)
            elif field.message_type.full_name == "google.protobuf.Struct":
                self._values(values.add(), depth)
            elif depth < 8:
                self.fill(values.add(), depth + 1)

    def _values(self, struct: Struct, depth: int) -> None:
        for _ in range(self.random.choice([0, 1, 2, 5])):
            self._one_value(struct.fields[self.random.choice(TEXTS)], depth)

    def _one_value(self, value: Value, depth: int) -> None:
        way = self.random.randrange(6 if depth < 6 else 4)
        if way == 0:
            value.number_value = self.random.choice([*REALS, *map(float, NUMBERS)])
        elif way == 1:
            value.string_value = self.random.choice(TEXTS)
        elif way == 2:
            value.bool_value = self.random.random() < 0.5
        elif way == 3:
            value.null_value = 0  # type: ignore[assignment]
        elif way == 4:
            for _ in range(self.random.choice([0, 1, 3, 100])):
                self._one_value(value.list_value.values.add(), depth + 2)
        else:
            self._values(value.struct_value, depth + 2)

    def value(self, field: Any) -> Any:
        """Of a field that is no message, by its rule."""
        random, kind = self.random, kind_of(field)
        if kind in ("text", "json"):
            return random.choice(TEXTS)
        if kind == "address":
            return random.choice(ADDRESSES)
        if kind == "bytes":
            return random.randbytes(random.choice([0, 1, 4, 31, 32, 33, 1000]))
        if kind == "real":
            return random.choice(REALS)
        if kind == "flag":
            return random.random() < 0.5
        value = random.choice(NUMBERS)
        if field.type in (FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_ENUM):
            return max(-(2**31), min(2**31 - 1, value - random.choice([0, 1, 2**31])))
        narrow = (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_FIXED32)
        return value % 2**32 if field.type in narrow else value

    def mutate(self, raw: bytes, others: Sequence[bytes]) -> bytes:
        random, mutated = self.random, bytearray(raw)
        for _ in range(random.randint(1, 6)):
            at = random.randint(0, len(mutated))
            way = random.randrange(7)
            if way == 0:
                del mutated[at:]
            elif way == 1 and mutated:
                mutated[at % len(mutated)] ^= 1 << random.randrange(8)
            elif way == 2:
                mutated[at:at] = random.randbytes(random.randint(1, 8))
            elif way == 3:
                del mutated[at : at + random.randint(1, 8)]
            elif way == 4:
                mutated[at:at] = mutated[: random.randint(0, 64)]
            elif way == 5:  # a length that lies
                lie = random.choice([b"\xff\xff\xff\xff\x07", b"\x80\x80\x80\x80\x80\x20", b"\xff" * 10])
                mutated[at : at + 1] = lie
            else:
                mutated += random.choice(others)[:2000]
        return bytes(mutated)

    def json(self, text: str) -> str:
        """With letters changed, or another value in it."""
        if self.random.random() < 0.5:
            return self.mutate(text.encode(), [text.encode()]).decode(errors="replace")
        at = self.random.choice([index for index, letter in enumerate(text) if letter in ":,[{"] or [0])
        end = next((index for index in range(at + 1, len(text)) if text[index] in ",]}"), len(text))
        rest = text[at + 1 :] if self.random.random() < 0.3 else text[end:]
        return text[: at + 1] + self.random.choice(JSON) + rest


def _has_rules(message: Any) -> bool:
    return not message.full_name.startswith("google.")
