"""Benchmarks that a user can repeat: of the engine, of prompts on it, and of any OpenAI server. A record names the
machine it was measured on."""
