"""Shared by train_gpt.py and decode_gpt.py: a GPT in plain PyTorch, its text, attention, training and cache."""
