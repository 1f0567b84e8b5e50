"""Reference tokens, logit digests and published vectors; see `golden.cases`."""
