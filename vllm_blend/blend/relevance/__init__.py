"""Rank the passages of a prompt by what they say: on the host, before anything is computed."""
