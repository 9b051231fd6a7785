"""The page to type into, in a real browser: text that streams, versions that change, tensors, any size of screen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paramserver.tests.serve.conftest import Reply
from paramserver.tests.serve.http_service import HttpService
from paramserver.tests.web.conftest import Tab, browser, tab  # noqa: F401  (fixtures)
from paramserver.worker.tasks.digits import Digits
from paramserver.worker.tasks.gpt import Gpt

pytestmark = pytest.mark.slow

Open = Callable[..., Tab]
PROMPT = "def "
# Of each text and what is behind it (WCAG 2).
CONTRAST = """() => {
  const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
  const linear = value => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = element => {
    const found = numbers(getComputedStyle(element).backgroundColor);
    return found.length === 4 && found[3] === 0 ? behind(element.parentElement) : found;
  };
  const texts = '#replies pre, #replies pre b, .tag, label, button:not(:disabled), .note';
  return [...document.querySelectorAll(texts)].map(element => {
    const [a, b] = [light(numbers(getComputedStyle(element).color)), light(behind(element))];
    return [element.className || element.tagName, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  });
}"""


class Gated:
    """A task of text that stops in the middle of a reply, after so many calls of decode()."""

    def __init__(self, task: Gpt) -> None:
        self.model, self.encode, self._decode = task.model, task.encode, task.decode
        self.context, self.cache_shape = task.context, task.cache_shape
        self.num_left = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def stop_after(self, num_calls: int) -> None:
        self.num_left = num_calls
        self.may_go_on.clear()

    def decode(self, tokens: list[int]) -> str:
        self.num_left -= 1
        if self.num_left < 0:
            self.may_go_on.wait()
        return self._decode(tokens)


class Page(HttpService):
    """ps-serve in this process, and what people see of it."""

    def __init__(self, task: Any, new_tab: Open, **options: Any) -> None:
        super().__init__(task, **options)
        self._task, self._tab = task, new_tab

    def open(self, **options: Any) -> Any:
        page = self._tab(**options).page
        page.goto(self.url)
        page.locator("#state[data-state=live]").wait_for()
        page.get_by_text("Try small").wait_for()
        return page

    def close(self) -> None:
        if isinstance(self._task, Gated):
            self._task.may_go_on.set()
        super().close()


@pytest.fixture
def served(tab: Open, task: Gpt) -> Iterator[Callable[..., Page]]:  # noqa: F811
    pages: list[Page] = []

    def start(of: Any = task, **options: Any) -> Page:
        pages.append(Page(of, tab, **options))
        return pages[-1]

    yield start
    for item in pages:
        item.close()


def text(reply: Reply) -> str:
    """The whole reply, once it is over."""
    end = reply.end()
    return "".join(reply.texts) + end.text


def fill(page: Any, **fields: str) -> None:
    for name, value in ({"temperature": "0", "tokens": "40"} | fields).items():
        page.locator(f"#{name}").fill(value)


def panes(page: Any) -> list[tuple[str, str, str]]:
    """Title, version and text of each reply."""
    return [
        (item.locator("h2").inner_text(), item.locator(".tag").inner_text(), item.locator("pre").inner_text())
        for item in page.locator("#replies section").all()
    ]


def until_over(page: Any) -> None:
    page.wait_for_function("() => document.getElementById('stop').disabled && document.querySelector('#replies .tag')")


def halted(served: Callable[..., Page], task: Gpt, **options: Any) -> tuple[Gated, Page, Any]:
    """A page whose reply to PROMPT stops in the middle."""
    gated = Gated(task)
    here = served(gated, **options)
    page = here.open()
    fill(page, prompt=PROMPT)
    gated.stop_after(20)
    page.get_by_role("button", name="Continue").click()
    return gated, here, page


def test_a_prompt_streams_its_text_while_a_newer_version_arrives(served: Callable[..., Page], task: Gpt) -> None:
    gated, here, page = halted(served, task)
    page.wait_for_function(f"() => document.querySelector('#replies pre')?.textContent.length > {len(PROMPT)}")
    ((_, version, first),) = panes(page)
    here.served.publish()
    gated.may_go_on.set()
    page.wait_for_function("() => document.getElementById('version').textContent.includes('version 2')")
    until_over(page)
    whole = PROMPT + text(here.served.ask(PROMPT, 40, version="run:1.1"))
    assert panes(page) == [("Reply", "run, version 1.1", whole)] and whole.startswith(first) and first != whole
    assert version == "run, version 1.1"


def test_the_version_of_a_reply_changes_before_the_reader_s_eyes(served: Callable[..., Page], task: Gpt) -> None:
    gated, here, page = halted(served, task, swap="in-flight")
    badge = page.locator("#replies .tag")
    badge.filter(has_text="run, version 1.1").wait_for()
    here.served.publish()
    gated.may_go_on.set()
    badge.filter(has_text="run, version 1.2").wait_for()
    until_over(page)


def test_temperature_seed_and_length_are_those_of_the_form(served: Callable[..., Page]) -> None:
    here = served()
    page = here.open()
    found = []
    for temperature, seed in (("0", ""), ("0", "3"), ("2", "3"), ("2", "3"), ("2", "4")):
        fill(page, prompt=PROMPT, temperature=temperature, seed=seed, tokens="30")
        assert page.locator("#temperature-value").inner_text() == temperature
        page.get_by_role("button", name="Continue").click()
        page.wait_for_function("() => document.querySelector('#replies pre')")
        until_over(page)
        found.append(panes(page)[0][2])
    assert found[0] == found[1] != found[2] == found[3] != found[4]
    page.locator("#prompt").fill("")
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("alert").filter(has_text="prompt is empty").wait_for()


def test_two_versions_stand_side_by_side(served: Callable[..., Page]) -> None:
    here = served()
    page = here.open()
    fill(page, prompt=PROMPT)
    page.get_by_label("Beside the version before").check()
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("alert").filter(has_text="There is no version before yet").wait_for()
    until_over(page)
    here.served.publish()
    page.wait_for_function("() => document.getElementById('version').textContent.includes('version 2')")
    page.get_by_role("button", name="Continue").click()
    page.wait_for_function("() => document.querySelectorAll('#replies section').length === 2")
    until_over(page)
    texts = [PROMPT + text(here.served.ask(PROMPT, 40, version=f"run:1.{number}")) for number in (2, 1)]
    assert panes(page) == [
        ("Version now", "run, version 1.2", texts[0]), ("Version before", "run, version 1.1", texts[1])
    ]  # fmt: skip
    boxes = [item.bounding_box() for item in page.locator("#replies section").all()]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]


def test_a_model_of_tensors_has_a_form(served: Callable[..., Page]) -> None:
    page = served(Digits()).open()
    area = page.get_by_role("textbox", name="input")
    assert page.locator("#text").is_hidden() and len(area.input_value().split()) == 64
    page.get_by_role("button", name="Compute").click()
    page.locator("#replies pre").wait_for()
    ((title, version, numbers),) = panes(page)
    assert (title, version, len(numbers.split())) == ("output [1, 10]", "version 1.1", 10)
    area.fill("1 2 3")
    page.get_by_role("button", name="Compute").click()
    page.get_by_role("alert").filter(has_text="has 64 values, and data 3").wait_for()
    area.fill("one")
    page.get_by_role("button", name="Compute").click()
    page.get_by_role("alert").filter(has_text="input").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_everything_fits_and_can_be_read(served: Callable[..., Page], width: int, scheme: str) -> None:
    here = served()
    page = here.open(viewport={"width": width, "height": 800}, color_scheme=scheme)
    fill(page, prompt=PROMPT + "x" * 300, tokens="64")
    page.get_by_role("button", name="Continue").click()
    page.wait_for_function("() => document.querySelector('#replies pre')")
    until_over(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("prompt", "temperature", "tokens", "seed", "beside", "send", "stop"):
        box = page.locator(f"#{name}").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["height"] >= 12, (name, box)
    contrast = page.evaluate(CONTRAST)
    assert [item for item in contrast if item[1] < 4.5] == []


def test_the_keyboard_is_enough_and_a_screen_reader_has_names(served: Callable[..., Page], task: Gpt) -> None:
    gated = Gated(task)
    here = served(gated)
    page = here.open()
    roles = [("textbox", "Prompt"), ("slider", "Temperature"), ("spinbutton", "Tokens"), ("spinbutton", "Seed"),
             ("checkbox", "Beside the version before"), ("button", "Continue")]  # fmt: skip
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # Skip to the prompt
    for role, name in roles:
        focused = page.locator("*:focus")
        assert focused.evaluate("element => element.id") == page.get_by_role(role, name=name).get_attribute("id")
        assert focused.evaluate("element => getComputedStyle(element).outlineStyle") != "none", name
        page.keyboard.press("Tab")
    page.get_by_role("slider", name="Temperature").focus()
    page.keyboard.press("Home")
    assert page.locator("#temperature-value").inner_text() == "0"
    page.get_by_role("textbox", name="Prompt").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("class ")
    gated.stop_after(20)
    page.keyboard.press("Control+Enter")
    region = page.get_by_role("region", name="Reply")
    page.wait_for_function("() => document.querySelector('#replies pre')?.textContent.length > 'class '.length")
    assert region.locator("pre").inner_text().startswith("class ")
    page.keyboard.press("Escape")
    assert page.get_by_role("button", name="Stop").is_disabled()
    gated.may_go_on.set()
    page.wait_for_function("() => fetch('/health').then(r => r.json()).then(h => h.active === 0)")
    assert page.locator("#state[role=status]").inner_text() == "ok"
    assert page.locator("#replies[aria-live=polite]").count() == 1
