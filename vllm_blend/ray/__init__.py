"""The choice among replicas of the engine, so that a request goes to one that holds its passages."""
