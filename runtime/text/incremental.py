"""Text as it is generated: characters appear when they are whole.

One id may end in the middle of a UTF-8 character. Its bytes are held back until the character is complete, or
until the next byte shows that it never will be. The joined deltas, flush included, are the plain decode of all ids.
"""

from __future__ import annotations

import codecs

from runtime.text.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes one stream of ids. Holds at most the three bytes of an unfinished character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The characters that this id completes; often none, sometimes several."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left of a character that will not be completed: U+FFFD, or nothing. Ready for a new stream."""
        return self._decoder.decode(b"", final=True)
