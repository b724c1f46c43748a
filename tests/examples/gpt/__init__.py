"""What train_gpt.py and decode_gpt.py share: a GPT in plain PyTorch, its text, its attention, its training, its cache."""
