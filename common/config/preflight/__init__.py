"""What would fail a run seconds later, found before torch is loaded and before any process starts.

Nothing here imports torch or runs code of the user's. Where a check cannot know it stays silent: the program that
needs the file, the device or the address still checks it itself.
"""
