"""Seeing: event log, metrics, audit rules, panel, plots."""
