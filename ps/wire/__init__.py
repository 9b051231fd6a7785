"""Streams of workers: messages to events, effects to messages. Decides nothing."""
