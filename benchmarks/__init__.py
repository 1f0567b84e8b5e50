"""Measurements: what this project's code reaches of what the machine could do. They record, and never pass or fail."""
