"""Doubles for tests of code that uses this library: a scripted engine, a byte tokenizer, tiny random models."""
