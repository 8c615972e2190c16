"""The audit: replay prompts plain and speculative, and judge every difference. See docs/audit.md."""
