"""Shared by train_gpt.py, decode_gpt.py and serve_gpt.py: a GPT in plain PyTorch, its text, attention, training and caches, and
a serving engine.
"""
