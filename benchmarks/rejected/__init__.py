"""Ideas that lose, each beside what the project does instead, on the same work: docs/rejected.md.

They live here and nowhere in `runtime/`: an idea takes the place of the smallest piece of the production code that
can hold it, for as long as it is tried.
"""
