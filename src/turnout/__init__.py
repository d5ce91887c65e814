"""Turnout: reinforcement-learning post-training, with the traffic between rollout and train as its subject."""

__version__ = "0.1.0"
