"""Shared by the examples: a GPT in plain PyTorch, its text, attention, training and caches, a serving engine, and the check of a
program's files.
"""
