"""The sampler's rules once more, in plain numpy and one row at a time."""

import numpy as np


def processed(logits, *, allowed=None, bias=None, prompt=(), output=(), rep=1.0, pres=0.0, freq=0.0):
    x = np.asarray(logits, np.float64).copy()
    if allowed is not None:
        x[~np.asarray(allowed)] = -np.inf
    if bias is not None:
        x = x + bias
    counts = np.bincount(np.asarray(output, int), minlength=len(x))
    for token in {*prompt, *output}:
        x[token] = x[token] / rep if x[token] > 0 else x[token] * rep
    x = x - freq * counts - pres * (counts > 0)
    return np.asarray(logits, np.float64) if np.all(x == -np.inf) else x


def distribution(x, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after temperature, min-p, top-k, top-p; likelier first, equal ones by id."""
    x = np.asarray(x, np.float64)
    if temperature < 1e-5 or top_k == 1:
        return np.eye(len(x))[np.argmax(x)]
    p = softmax((x - x.max()) / temperature)
    p[p < min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    if top_p < 1:
        before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
        p[order[before >= top_p * p.sum()]] = 0
    return p / p.sum()


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()
