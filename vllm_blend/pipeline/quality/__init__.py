"""How good blended answers are, and what they cost: every rule and lever on one engine, against full prefill."""
