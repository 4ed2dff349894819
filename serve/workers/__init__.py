"""Processes that encode prompts and compute the masks of grammars."""
