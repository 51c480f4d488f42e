"""pyvision_mini: agentic vision RL (PyVision-RL, arXiv 2602.20739), small enough to read in an evening."""
