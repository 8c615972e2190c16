"""The endpoints: one function each, one file per family. `translate` reads bodies, `answers` writes answers."""
