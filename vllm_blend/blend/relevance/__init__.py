"""Which passages of a prompt matter for its question, by their words: on the host, before anything is computed."""
