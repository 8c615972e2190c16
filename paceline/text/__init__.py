"""Text and tokens: tokenizers read from Hugging Face and GGUF files, and the detokenizer of a growing answer."""
