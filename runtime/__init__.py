"""expertstream: run mixture-of-experts models far larger than memory from ordinary SSDs."""

__version__ = "0.1.0"
