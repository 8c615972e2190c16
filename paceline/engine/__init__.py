"""The engine: plan, draft, verify, accept, commit, emit. Knows nothing of HTTP."""
