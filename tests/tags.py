"""What a browser would make of an HTML text: its tags, the names of their attributes, and the data of a report."""

from __future__ import annotations

from html.parser import HTMLParser


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.attributes: set[str] = set()
        self.data = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script" and data.startswith("{") and '"runs"' in data:
            self.data = data
