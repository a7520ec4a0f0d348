"""Where a model's thinking ends and its answer begins. Knows no model: the chat template opens the thinking, a mark in the text ends it."""

from __future__ import annotations

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def starts_thinking(prompt: str) -> bool:
    """Whether the text behind this prompt starts inside a thinking block."""
    return prompt.rstrip().endswith(THINK_OPEN)


class Splitter:
    """Splits a text, given in pieces of any size, at the mark that ends the thinking. The mark belongs to neither side."""

    def __init__(self, thinking: bool):
        self.thinking = thinking
        self._held = ""  # may become the mark; shorter than it

    def push(self, text: str) -> tuple[str, str]:
        """What is certain with this piece: thinking, answer."""
        if not self.thinking:
            return "", text
        text = self._held + text
        at = text.find(THINK_CLOSE)
        if at >= 0:
            self.thinking, self._held = False, ""
            return text[:at], text[at + len(THINK_CLOSE) :]
        keep = next((n for n in range(min(len(text), len(THINK_CLOSE) - 1), 0, -1) if text.endswith(THINK_CLOSE[:n])), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def finish(self) -> str:
        """Thinking that was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
