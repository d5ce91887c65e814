"""`turnout check`: what can be proved of a deployment before a run needs it. Facts are gathered, verdicts are
pure."""
