"""What recorded traffic would have been with another drafter, draft length or batch: in simulated time, or for real."""
