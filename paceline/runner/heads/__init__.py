"""Heads that run: passes of EAGLE-3 and Medusa heads over a target's hidden states."""
