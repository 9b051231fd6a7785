"""The sections of the configuration, each a class whose fields say their unit and what setting them wrong does.

No `from __future__ import annotations` in these files: pydantic would compile each field's annotation again, 20 ms of
every start.
"""
