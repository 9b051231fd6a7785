"""The gpt task: which bytes it reads, that it cannot look ahead, and that it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paramserver.common.errors import UsageError
from paramserver.worker.tasks.gpt import Gpt, Transformer

TINY = {"context": 16, "num_layers": 1, "num_heads": 2, "width": 32}


def _bytes_of(task: Gpt) -> bytes:
    """The training text, put together again from the windows, which share a byte with their neighbour."""
    windows = task.train_data().tensors[0]
    return bytes(windows[0, :1].tolist()) + bytes(windows[:, 1:].flatten().tolist())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(i * i % 251 for i in range(1000)))
    return path


def test_windows_cover_the_first_nine_tenths_in_order_and_overlap_by_one_byte(text):
    task = Gpt(text=str(text), **TINY)
    data = task.train_data()
    content = text.read_bytes()
    assert task.tokens_per_sample == 16
    assert len(data) == (900 - 1) // 16
    assert bytes(data[3][0].tolist()) == content[48 : 48 + 17]
    assert _bytes_of(task) == content[: 16 * len(data) + 1]


def test_evaluation_sees_only_the_last_tenth(text):
    content = bytearray(text.read_bytes())
    content[900:] = b"Z" * 100
    text.write_bytes(content)
    task = Gpt(text=str(text), **TINY)
    seen = []
    model = task.model()
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    metrics = task.evaluate(model)
    assert set(torch.cat(seen).flatten().tolist()) == {ord("Z")}
    assert metrics["unigram_bits_per_byte"] == 0
    assert metrics["bits_per_byte"] == pytest.approx(8, rel=1e-5)  # a new model guesses uniformly


def test_the_yardstick_is_the_entropy_of_the_evaluated_bytes(tmp_path):
    (tmp_path / "ab.txt").write_bytes(b"abac" * 400)  # a half, b and c a quarter each: 1.5 bits
    task = Gpt(text=str(tmp_path / "ab.txt"), **TINY)
    assert task.evaluate(task.model())["unigram_bits_per_byte"] == pytest.approx(1.5, rel=1e-5)


def test_eval_bytes_bounds_the_evaluation_and_spreads_it(text):
    text.write_bytes(bytes(range(200)) * 50)
    few = Gpt(text=str(text), eval_bytes=32, **TINY)
    seen = []
    model = few.model()
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    few.evaluate(model)
    (inputs,) = seen
    assert inputs.shape == (2, 16)  # 32 bytes: the first and the last window of the held-out 1,000
    assert inputs[0, 0] == 0
    assert inputs[1, 0] == (61 * 16) % 200


def test_files_of_a_glob_are_joined_in_sorted_order_up_to_max_bytes(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, letter in (("b.txt", b"B"), ("a.txt", b"A"), ("sub/c.txt", b"C"), ("d.md", b"D")):
        (tmp_path / name).write_bytes(letter * 200)
    everything = _bytes_of(Gpt(text=str(tmp_path / "**" / "*.txt"), **TINY))
    assert everything.startswith(b"A" * 200 + b"B" * 200 + b"C")
    assert b"D" not in everything
    capped = _bytes_of(Gpt(text=str(tmp_path / "**" / "*.txt"), max_bytes=300, **TINY))
    assert capped == (b"A" * 200 + b"B" * 200)[: len(capped)]
    assert 250 < len(capped) <= 270


def test_no_prediction_depends_on_a_later_byte_but_every_one_on_the_first():
    torch.manual_seed(0)
    model = Transformer(num_layers=2, num_heads=2, width=16)
    for parameter in model.parameters():  # the zeros it begins with would hide everything
        torch.nn.init.normal_(parameter)
    tokens = torch.randint(256, (1, 12))
    later, first = tokens.clone(), tokens.clone()
    later[0, 7] += 1
    first[0, 0] += 1
    with torch.no_grad():
        logits, with_later, with_first = model(tokens), model(later), model(first)
    assert torch.equal(logits[0, :7], with_later[0, :7])
    assert (logits != with_later)[0, 7:].any(dim=1).all()
    assert (logits != with_first)[0].any(dim=1).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"no file matches '.*text\.txt'"),
        (b"", r"is 0 bytes: too short .* windows of 17 bytes"),
        (b"x" * 160, r"is 160 bytes: too short"),
    ],
)
def test_too_little_text_is_refused(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        Gpt(text=str(path), **TINY)
