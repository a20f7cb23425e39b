"""Faults at every moment of a scenario, one after the other."""
