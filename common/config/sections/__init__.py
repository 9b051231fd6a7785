"""The sections of the configuration. Each is a class, whose fields have types, limits and help texts.

These files have no `from __future__ import annotations`: pydantic would compile each field's annotation again, which
takes 20 ms of every start.
"""
