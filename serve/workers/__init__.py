"""Processes that read prompts and follow grammars."""
