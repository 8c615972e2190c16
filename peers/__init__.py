"""Measuring scripts: Paceline beside its peers. Not part of the package and never imported by it."""
