"""Structured outputs: answers of a form that the request gives, held by masks of the tokens that may come next."""
