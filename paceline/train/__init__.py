"""Training drafters for a target of one's own: from a file of prompts to a directory that the registry loads."""
