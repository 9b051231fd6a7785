"""Checks before torch is loaded and before any process starts, for mistakes that would fail a run seconds later.

These checks do not import torch and do not run the user's code. A check that cannot decide reports nothing: the program
that needs the file, the device or the address checks it again.
"""
