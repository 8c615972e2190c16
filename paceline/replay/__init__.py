"""Recorded traffic as it would be with another drafter, draft length or batch: in simulated time, or for real."""
