"""Eviction of KV by head, which frees pages (KV-Compress; Rehg, 2024)."""
