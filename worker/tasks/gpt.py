"""A small transformer that predicts text byte by byte, from any text file, without a tokenizer or a download.

The model has some megabytes and a realistic loss curve. By default it reads the sources of Python's standard library,
which every machine with Python has. Other versions of Python have slightly different bytes.
"""

from __future__ import annotations

import glob
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from ...common.errors import UsageError
from .base import check_whole, held_out_means

_VOCABULARY = 256  # byte values
_HELD_OUT_FRACTION = 0.1  # the end of the text
_EVAL_BATCH = 32  # windows per forward pass of an evaluation, which limits its memory
_STDLIB_SKIPS = {"test", "idlelib", "lib2to3", "turtledemo"}  # packages that some installations lack


class Gpt:
    """Bytes of `text` (a file or a glob, `**` allowed) cut into windows of `context` bytes.

    `max_bytes` limits the text, in the order of the sorted paths. `tokens_per_sample` is the number of predictions per
    sample. Measured on one CPU core with batches of 16: 11,700 tokens/s. AdamW with lr 0.003 goes from 8 bits per byte
    to 2.9, 2.5 and 2.2 in 250, 500 and 1,000 steps (45, 88 and 176 s). Unigrams have 4.55. Four asynchronous workers
    need lr 0.001 and reach 3.3 after 100 steps each.
    """

    def __init__(
        self,
        *,
        text: str | None = None,
        max_bytes: int = 4_000_000,
        context: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        width: int = 128,
        eval_bytes: int = 32_768,
    ) -> None:
        self.tokens_per_sample = self.context = check_whole("context", context, least=2)
        self._sizes = {"num_layers": num_layers, "num_heads": num_heads, "width": width}
        for key, size in self._sizes.items():
            check_whole(key, size, least=1)
        if width % (2 * num_heads):  # rotary embeddings rotate pairs of a head's channels
            near = max(1, width // (2 * num_heads)) * 2 * num_heads
            message = f"task.args.width is {width}: not a multiple of 2 * num_heads, {2 * num_heads}"
            raise UsageError(message, fix=f"e.g. width: {near}")
        data = _read(text, check_whole("max_bytes", max_bytes, least=1))  # (N,) uint8
        num_train = len(data) - int(len(data) * _HELD_OUT_FRACTION)
        self._train = _windows(data[:num_train], context)
        held_out = _windows(data[num_train:], context)
        if min(len(self._train), len(held_out)) == 0:
            windows = f"training and held-out windows of {context + 1} bytes"
            message = f"task.args.text is {len(data)} bytes: too short for {windows}"
            raise UsageError(message, fix="give more text, or a smaller task.args.context")
        # Evenly spaced windows represent all of the held-out text.
        num_eval = min(len(held_out), -(-check_whole("eval_bytes", eval_bytes, least=1) // context))
        self._eval = held_out[torch.linspace(0, len(held_out) - 1, num_eval, device="cpu").long()]  # (num_eval, T + 1)

    @staticmethod
    def num_elements(*, context: int, num_layers: int, width: int, **_: Any) -> int:
        """As in `Task`. A layer keeps about 16 numbers of each token and channel."""
        return num_layers * width * (12 * width + 16 * context) + 2 * _VOCABULARY * width

    def model(self) -> nn.Module:
        return Transformer(**self._sizes)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Return the number of layers, heads, and channels of a head, for a cache of keys and values."""
        num_heads = self._sizes["num_heads"]
        return self._sizes["num_layers"], num_heads, self._sizes["width"] // num_heads

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, which are its UTF-8 bytes."""
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens. Bytes that are not UTF-8 become U+FFFD."""
        return bytes(tokens).decode(errors="replace")

    def train_data(self) -> Dataset[Any]:
        """Samples are windows (context + 1,) uint8. The last byte is only a target."""
        return TensorDataset(self._train)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        (windows,) = batch  # (B, T + 1)
        inputs, targets = windows[:, :-1].long(), windows[:, 1:].long()  # (B, T) each
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Held-out `loss` (nats per byte), `bits_per_byte`, and `unigram_bits_per_byte` for comparison.

        The latter is the entropy of the byte frequencies, the least that a model without context can reach.
        """

        def measure(windows: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.loss(model, (windows,)) * len(windows)}

        loss = held_out_means(model, (self._eval,), measure, _EVAL_BATCH)["loss"]
        counts = self._eval[:, 1:].flatten().bincount(minlength=_VOCABULARY)  # (256,)
        unigram = torch.special.entr(counts / counts.sum()).sum().item()  # nats
        bits = 1 / math.log(2)  # bits per nat
        return {"loss": loss, "bits_per_byte": loss * bits, "unigram_bits_per_byte": unigram * bits}


class Transformer(nn.Module):
    """Pre-norm decoder: rotary positions, norms without weights, squared ReLU. (B, T) -> logits (B, T, 256).

    It has no buffers, because those would travel with every exchange. T may have any value.
    """

    def __init__(self, *, num_layers: int, num_heads: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(num_heads=num_heads, width=width) for _ in range(num_layers))
        self.head = nn.Linear(width, _VOCABULARY, bias=False)
        nn.init.zeros_(self.head.weight)  # the first loss is that of a uniform guess, ln 256 = 5.55

    def forward(self, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
        """Logits of tokens (B, T). With a `cache` (serve/cache.py) they follow the tokens that it has."""
        x = _norm(self.embedding(tokens))  # (B, T, C)
        for layer, block in enumerate(self.blocks):
            x = block(x, cache, layer)
        return self.head(_norm(x))

    def pipeline(self) -> list[nn.Module]:
        """The layers of `forward`, for stages of a pipeline."""
        norm = nn.RMSNorm(self.embedding.embedding_dim, elementwise_affine=False)
        return [nn.Sequential(self.embedding, norm), *self.blocks, nn.Sequential(norm, self.head)]


class Block(nn.Module):
    """Attention, then a multi-layer perceptron, each added to its input: (B, T, C) -> (B, T, C)."""

    def __init__(self, *, num_heads: int, width: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        # Each block starts as the identity, so depth does not hurt the first steps.
        nn.init.zeros_(self.attention_out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: torch.Tensor, cache: Any = None, layer: int = 0) -> torch.Tensor:
        x = x + self.attention(_norm(x), cache, layer)
        return x + self.down(F.relu(self.up(_norm(x))).square())

    def attention(self, x: torch.Tensor, cache: Any = None, layer: int = 0) -> torch.Tensor:
        num_samples, num_tokens, width = x.shape  # B, T, C = H * D
        heads = self.qkv(x).view(num_samples, num_tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        # Normalised queries and keys keep the logits small at any learning rate (Henry et al., 2020).
        if cache is None:
            position, mask = torch.arange(num_tokens, device=x.device, dtype=x.dtype), None  # (T,)
        else:
            position, mask = cache.positions.to(x.dtype).unsqueeze(1), cache.mask  # (B, 1, T)
        q, k = _rotate(_norm(q), position), _rotate(_norm(k), position)
        if cache is not None:
            k, v = cache.append(layer, k, v)  # (B, H, S, D) each, with what came before
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=cache is None)  # (B, H, T, D)
        return self.attention_out(y.transpose(1, 2).reshape(num_samples, num_tokens, width))


def _norm(x: torch.Tensor) -> torch.Tensor:
    """Scale the last axis to a root mean square of 1."""
    return F.rms_norm(x, (x.shape[-1],))


def _rotate(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al., 2021) of (B, H, T, D): rotate channel pairs by the position.

    Positions are (T,) or (B, 1, T).
    """
    num_pairs = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(num_pairs, device=x.device, dtype=x.dtype) / num_pairs)
    angle = position.unsqueeze(-1) * frequency  # (..., T, D / 2)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.chunk(2, dim=-1)  # (B, H, T, D / 2) each
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def _windows(data: torch.Tensor, context: int) -> torch.Tensor:
    """Cut (N,) into windows (num_windows, context + 1), as a view.

    Neighbours share a byte, so each byte is a target once.
    """
    if len(data) <= context:
        return data.new_empty(0, context + 1)
    return data.unfold(0, context + 1, context)


def _read(text: str | None, max_bytes: int) -> torch.Tensor:
    """Return the first `max_bytes` bytes of the files of `text`, (N,) uint8. Raises UsageError without files."""
    content = bytearray()
    num_files = 0
    for path in _stdlib_sources() if text is None else _matching(text):
        try:
            with path.open("rb") as file:
                content += file.read(max_bytes - len(content))
        except OSError as error:
            message = f"task.args.text: {path} cannot be read: {error.strerror}"
            raise UsageError(message, fix="give files that can be read") from error
        num_files += 1
        if len(content) == max_bytes:
            break
    if num_files == 0:
        problem = "this Python comes without its sources" if text is None else f"no file matches {text!r}"
        raise UsageError(f"task.args.text: {problem}", fix="give a file or a glob, absolute or relative to this folder")
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8, device="cpu")


def _matching(text: Any) -> Iterator[Path]:
    if not isinstance(text, str):
        raise UsageError(f"task.args.text is {text!r}, not a path", fix="e.g. text: books/*.txt")
    found = glob.glob(str(Path(text).expanduser()), recursive=True)
    yield from (path for path in sorted(map(Path, found)) if path.is_file())


def _stdlib_sources() -> Iterator[Path]:
    """Python's own modules, then its packages, each sorted by name. Packages are listed lazily."""
    root = Path(sysconfig.get_paths()["stdlib"])
    yield from sorted(root.glob("*.py"))
    for package in sorted(path.parent for path in root.glob("*/__init__.py")):
        if package.name not in _STDLIB_SKIPS:
            yield from sorted(package.rglob("*.py"))


ENTRY = Gpt
