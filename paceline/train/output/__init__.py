"""What a training leaves behind: packed weights, model card, curves, tokenizer files."""
